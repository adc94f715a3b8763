"""What an attacker may do to the metadata of a publication; used by test_trust_attacks.py."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import MetaFile

from tests.support.simulator import Simulator, signed

PAST = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)


def rollback_of_timestamp(repo: Simulator) -> None:
    repo.timestamp.version -= 1
    repo.put_timestamp()


def rollback_of_snapshot(repo: Simulator) -> None:
    repo.snapshot.version -= 1
    repo.put_snapshot()
    repo.timestamp.version += 1
    repo.put_timestamp()


def rollback_of_targets(repo: Simulator) -> None:
    repo.targets.version -= 1
    repo.put_targets()
    repo.snapshot.version += 1
    repo.put_snapshot()
    repo.timestamp.version += 1
    repo.put_timestamp()


def freeze_by_timestamp(repo: Simulator) -> None:
    repo.timestamp.expires = PAST
    repo.advance()


def freeze_by_snapshot(repo: Simulator) -> None:
    repo.snapshot.expires = PAST
    repo.advance()


def freeze_by_targets(repo: Simulator) -> None:
    repo.targets.expires = PAST
    repo.advance()


def freeze_by_root(repo: Simulator) -> None:
    repo.next_root()
    repo.root.expires = PAST
    repo.put_root()


def mix_of_snapshots(repo: Simulator) -> None:
    old = repo.files[f"{repo.snapshot.version}.snapshot.json"]
    repo.advance()
    repo.files[f"{repo.snapshot.version}.snapshot.json"] = old


def mix_of_targets(repo: Simulator) -> None:
    old = repo.files[f"{repo.targets.version}.targets.json"]
    repo.advance()
    repo.files[f"{repo.targets.version}.targets.json"] = old


def snapshot_of_another_version(repo: Simulator) -> None:
    repo.advance()
    repo.timestamp.version += 1
    repo.timestamp.snapshot_meta = MetaFile(repo.snapshot.version + 1)
    repo.put_timestamp()
    name = f"{repo.snapshot.version}.snapshot.json"
    repo.files[f"{repo.snapshot.version + 1}.snapshot.json"] = repo.files[name]


def targets_of_another_version(repo: Simulator) -> None:
    data = repo.files[f"{repo.targets.version}.targets.json"]
    repo.snapshot.meta["targets.json"] = MetaFile(repo.targets.version + 1)
    repo.files[f"{repo.targets.version + 1}.targets.json"] = data
    repo.snapshot.version += 1
    repo.put_snapshot()
    repo.timestamp.version += 1
    repo.put_timestamp()


def targets_missing_in_snapshot(repo: Simulator) -> None:
    repo.snapshot.meta = {"other.json": MetaFile(1)}
    repo.snapshot.version += 1
    repo.put_snapshot()
    repo.timestamp.version += 1
    repo.put_timestamp()


def stranger_signs(role: str) -> Callable[[Simulator], None]:
    def attack(repo: Simulator) -> None:
        repo.signers[role] = [CryptoSigner.generate_ed25519()]
        repo.advance()

    return attack


def nobody_signs(role: str) -> Callable[[Simulator], None]:
    def attack(repo: Simulator) -> None:
        repo.signers[role] = []
        repo.advance()

    return attack


def other_role_signs_timestamp(repo: Simulator) -> None:
    repo.signers["timestamp"] = repo.signers["snapshot"]
    repo.advance()


def signature_of_other_content(repo: Simulator) -> None:
    data = json.loads(repo.files["timestamp.json"])
    data["signed"]["version"] += 1
    repo.files["timestamp.json"] = json.dumps(data).encode()


def root_by_new_key_only(repo: Simulator) -> None:
    repo.next_root()
    repo.replace_key("root")
    repo.put_root()


def root_not_by_itself(repo: Simulator) -> None:
    repo.next_root()
    old = repo.replace_key("root")
    repo.put_root(old)


def root_that_skips_a_version(repo: Simulator) -> None:
    version = repo.root.version + 1
    repo.next_root()
    repo.root.version += 1
    repo.put_root()
    repo.files[f"{version}.root.json"] = repo.files.pop(f"{repo.root.version}.root.json")


def root_that_goes_back(repo: Simulator) -> None:
    repo.files[f"{repo.root.version + 1}.root.json"] = repo.files["1.root.json"]


def revoked_timestamp_key(repo: Simulator) -> None:
    repo.next_root()
    old = repo.replace_key("timestamp")
    repo.put_root()
    repo.signers["timestamp"] = [old]
    repo.advance()


def revoked_targets_key(repo: Simulator) -> None:
    repo.next_root()
    old = repo.replace_key("targets")
    repo.put_root()
    repo.signers["targets"] = [old]
    repo.advance()


def threshold_not_met(repo: Simulator) -> None:
    repo.next_root()
    repo.root.add_key(CryptoSigner.generate_ed25519().public_key, "timestamp")
    repo.root.roles["timestamp"].threshold = 2
    repo.put_root()
    repo.advance()


def threshold_by_one_key_twice(repo: Simulator) -> None:
    repo.next_root()
    repo.root.add_key(CryptoSigner.generate_ed25519().public_key, "timestamp")
    repo.root.roles["timestamp"].threshold = 2
    repo.put_root()
    repo.advance()
    data = json.loads(repo.files["timestamp.json"])
    data["signatures"] *= 2
    repo.files["timestamp.json"] = json.dumps(data).encode()


def wrong_type(repo: Simulator) -> None:
    repo.files["timestamp.json"] = signed(repo.snapshot, repo.signers["timestamp"])


def no_json(repo: Simulator) -> None:
    repo.files["timestamp.json"] = b"\xff\x00 not JSON"


def deep_json(repo: Simulator) -> None:
    repo.files["timestamp.json"] = b"[" * 10_000


def unknown_specification(repo: Simulator) -> None:
    data = json.loads(repo.files["timestamp.json"])
    data["signed"]["spec_version"] = "99.0.0"
    repo.files["timestamp.json"] = json.dumps(data).encode()


ATTACKS: list[Callable[[Simulator], None]] = [
    rollback_of_timestamp, rollback_of_snapshot, rollback_of_targets, freeze_by_timestamp,
    freeze_by_snapshot, freeze_by_targets, freeze_by_root, mix_of_snapshots, mix_of_targets,
    snapshot_of_another_version, targets_of_another_version, targets_missing_in_snapshot,
    other_role_signs_timestamp, signature_of_other_content, root_by_new_key_only,
    root_not_by_itself, root_that_skips_a_version, root_that_goes_back, revoked_timestamp_key,
    revoked_targets_key, threshold_not_met, threshold_by_one_key_twice, wrong_type, no_json,
    deep_json, unknown_specification,
]  # fmt: skip
SIGNED_WRONG = [(how, role) for how in (stranger_signs, nobody_signs) for role in
                ("timestamp", "snapshot", "targets")]  # fmt: skip
