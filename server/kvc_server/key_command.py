"""`sgl-kvc key`: make an API key. It is shown once; the file of keys holds its hash."""

from __future__ import annotations

import argparse
import json

from kvc_server.tenants import digest, new_key


def run(options: argparse.Namespace, _: tuple[str, ...]) -> int:
    """Print the key and its entry."""
    key = new_key()
    print(f"The key, for {options.name}; nobody can show it again:\n\n{key}\n")
    print('Its entry in the list "keys" of the file (docs/http.md):\n')
    print(json.dumps({"name": options.name, "sha256": digest(key)}, indent=2))
    return 0
