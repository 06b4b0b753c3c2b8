"""The rules a device runs with: the live ones, the ones before them, and a candidate, each one file."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import RulesError
from fednl_runtime.fed_sync.device.files import move_file, write_file
from fednl_runtime.rules import RuleSet, Shapes, load_rules

log = logging.getLogger("fednl_runtime.sync")


@dataclasses.dataclass(frozen=True)
class VersionedRules:
    """Published rules."""

    version: int
    rules: RuleSet


class LiveRules:
    """The rules of one model in a folder; a switch is a rename, so that a crash leaves old or new rules, whole."""

    def __init__(self, folder: Path, shapes: Shapes, fingerprint: str) -> None:
        """The rules kept in `folder` for the model with these rules and fingerprint."""
        self._live, self._previous = folder / "live.safetensors", folder / "previous.safetensors"
        self._candidate = folder / "candidate.safetensors"
        self._shapes, self._fingerprint = shapes, fingerprint

    def live(self) -> VersionedRules | None:
        """The live rules; if they cannot be loaded those before them go live again; None means the model's own."""
        for path in (self._live, self._previous):
            if path.exists():
                try:
                    found = self._load(path)
                except RulesError as error:
                    log.error("rules were rolled back: %s", error)
                    continue
                if path != self._live:
                    move_file(path, self._live)
                return found
        return None

    def previous(self) -> VersionedRules | None:
        """The rules that a rollback goes back to; None means the model's own."""
        try:
            return self._load(self._previous) if self._previous.exists() else None
        except RulesError as error:
            log.error("the rules before the live ones are lost: %s", error)
            return None

    def propose(self, data: bytes) -> VersionedRules:
        """Keep the file of new rules beside the live ones, and load it. Raises RulesError."""
        write_file(self._candidate, data)
        return self._load(self._candidate)

    def switch(self) -> None:
        """Make the candidate live and keep what was live, in two renames."""
        if self._live.exists():
            move_file(self._live, self._previous)
        crash_point("rules_between_renames")
        move_file(self._candidate, self._live)
        crash_point("rules_switched")

    def roll_back(self) -> VersionedRules | None:
        """Go back to the rules before the live ones; None means the model's own."""
        if self._previous.exists():
            move_file(self._previous, self._live)
        else:
            self._live.unlink(missing_ok=True)
        return self.live()

    def _load(self, path: Path) -> VersionedRules:
        rules, notes = load_rules(path)
        rules.require(self._shapes, self._fingerprint)
        version = notes.get("version", "")
        if not (version.isascii() and version.isdigit() and 0 < len(version) < 10):
            raise RulesError(f"{path} does not say which version it is. Fetch it again.")
        return VersionedRules(int(version), rules)
