# SPDX-License-Identifier: Apache-2.0
"""Dense layers in MXFP4 and MXFP8, weights only: formats, a product for CPUs, layers."""
