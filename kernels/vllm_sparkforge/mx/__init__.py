# SPDX-License-Identifier: Apache-2.0
"""Dense layers in fewer bits, weights only: formats, a product for CPUs, layers."""
