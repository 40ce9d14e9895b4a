"""Ports of the local stack: chosen before they are used, and nobody's meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli import stack


def test_a_port_is_free_and_none_that_a_client_may_be_given() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        assert 0 < stack.port_free() < first


def test_the_wanted_port_is_taken_while_it_is_free() -> None:
    wanted = stack.port_free()
    assert stack.port_free(wanted) == wanted
    with socket.socket() as taken:
        taken.bind((stack.HOST, wanted))
        taken.listen()
        assert stack.port_free(wanted) not in {0, wanted}


def test_where_clients_may_be_given_all_ports_the_system_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "range"
    held.write_text("1024\t65535\n")
    monkeypatch.setattr(stack, "_CLIENT_PORTS", held)
    monkeypatch.setattr(stack, "_PORT_TRIES", 0)
    assert stack.port_free() >= 1024
