"""A node that is killed while it lets go of a revoked adapter never serves it again."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.integration.killed_world import KilledNode

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

# The registry outlives the node: what is revoked and who acknowledged stands in files.
PROGRAM = """
    def node_heartbeat(self, *arguments):
        self.look()
        return super().node_heartbeat(*arguments)
    def feed(self, *arguments):
        self.look()
        return super().feed(*arguments)
    def look(self):
        if (root / "revoked").exists():
            if not self.artifacts[digest].revoked:
                self.revoke(digest)
            # The file says what is outstanding, also to the node that is started again.
            self.outstanding.clear()
            owed = {"tenantId": str(sw.TENANT_ID), "adapterDigest": digest, "deadlineSeconds": None}
            self.overdue = [] if (root / "acknowledged").exists() else [owed]
    def node_acknowledge(self, node, tenant_id, digest, freed, purged):
        stand_at("acknowledge")
        with (root / "acknowledged").open("a") as file:
            file.write(digest)
        stand_at("acknowledged")
from gpu_worker.serving.admission import Admission
from gpu_worker.serving.disk import Disk
from gpu_worker.serving.emptying import Emptying
from gpu_worker.serving.store import NodeStore
revoked = lambda *_: (root / "revoked").exists()
standing(Emptying, "_drain", "drain", when=revoked)
standing(Disk, "purge", "purge", when=revoked)
standing(NodeStore, "remove", "slots removed", when=revoked)
standing(NodeStore, "files_remove", "", "files removed", revoked)
standing(Admission, "detach", "unload", "unloaded", revoked)
"""
# What lies on the disk still where the node was killed: files, what they are revoked by, pages.
LEFT = {
    "drain": (1, 1, 1),
    "purge": (1, 1, 1),
    "slots removed": (1, 1, 0),
    "files removed": (0, 1, 0),
    "unload": (0, 0, 0),
    "unloaded": (0, 0, 0),
    "acknowledge": (0, 0, 0),
    "acknowledged": (0, 0, 0),
}


@pytest.mark.parametrize("step", LEFT)
def test_a_node_killed_while_it_lets_go_never_serves_again_and_ends_it(
    tmp_path: Path, step: str
) -> None:
    node = KilledNode(tmp_path, PROGRAM, step)
    adapters, slots = node.store / "adapters", node.store / "slots"

    def left() -> tuple[int, int, int]:
        kept = [path.suffix for path in adapters.glob("*/*")]
        return kept.count(""), kept.count(".json"), len([*slots.glob("*.page")])

    def acknowledged() -> str:
        path = tmp_path / "acknowledged"
        return path.read_text() if path.exists() else ""

    node.start()
    try:
        assert node.ask().status_code == 200
        node.until(lambda: left() == (1, 1, 1))
        (tmp_path / "revoked").write_text("")
        node.until((tmp_path / "reached").exists)
        assert node.ask().status_code == 403
        node.kill_at_step()
    finally:
        node.end()
    assert left() == LEFT[step]
    assert acknowledged() == (node.digest if step == "acknowledged" else "")

    node.go()
    node.start()
    try:
        assert node.ask().status_code == 403
        node.until(lambda: acknowledged() != "")
        assert left() == (0, 0, 0)
        items = httpx.get(f"{node.url}/v1/residency", timeout=60).json()["items"]
        assert [item["state"] for item in items if item["state"]] == []
        assert node.ask().status_code == 403
        assert acknowledged() == node.digest
    finally:
        node.end()
