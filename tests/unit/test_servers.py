"""Servers of a plain environment: ports, and what is shown of one that does not start."""

from __future__ import annotations

import socket

import pytest

from sparkforge.errors import PortError, SmokeError
from sparkforge.servers import LOOPBACK, free_port


def test_a_taken_port_has_an_exit_code_of_its_own() -> None:
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortError, match=f"port {port} on {LOOPBACK} is taken") as refusal:
            free_port(port)
    assert refusal.value.exit_code != SmokeError.exit_code
    assert "--port" in refusal.value.remedy
