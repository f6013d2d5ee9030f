"""Files of API keys for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvc_server.tenants import digest, new_key


class Keys:
    """A file of keys that a test writes.

    Attributes
    ----------
    entries : what each name's entry says besides its key.
    """

    def __init__(self, path: Path, **entries: dict[str, Any]):
        self.path = path
        self.keys = {name: new_key() for name in entries}
        self.write(**entries)

    def write(self, **entries: dict[str, Any]) -> None:
        """The entries from now on; a name that is not among them has no key any more."""
        listed = [{"name": name, "sha256": digest(self.keys[name]), **entry}
                  for name, entry in entries.items()]  # fmt: skip
        self.path.write_text(json.dumps({"keys": listed}))

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[name]}"}
