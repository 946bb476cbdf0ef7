# SPDX-License-Identifier: Apache-2.0
"""The library ``torch.ops.sparkforge``: what torch.compile takes as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

_LIBRARY = Library("sparkforge", "FRAGMENT")  # operators live as long as it does


def register(name: str, function: Callable[..., Any], fake: Callable[..., Any], **how: Any) -> None:
    """Define ``torch.ops.sparkforge.NAME``.

    Args:
        fake: gives the shapes of what ``function`` returns.
        how: ``dispatch_key`` and ``tags`` of vLLM's ``direct_register_custom_op``.
    """
    direct_register_custom_op(name, function, fake_impl=fake, target_lib=_LIBRARY, **how)
