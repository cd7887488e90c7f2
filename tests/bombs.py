"""Inputs that cost a careless parser gigabytes or minutes, shown to ours under a limit on memory.

Run as a program, because the limit is for good: prints how many were refused, or taken at small
cost; a bomb that goes off ends it with a traceback that names it.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzz_kit import cpu_limit

from supervisor import config, contract, journal, ledger, sidecars
from supervisor.contract import ContractError
from supervisor.rows import LedgerDamaged
from supervisor.rundir import RunError

MEMORY_BYTES = 600 * 1024 * 1024
K = 1024
REFUSALS = (
    ContractError,
    config.ConfigError,
    journal.JournalDamaged,
    LedgerDamaged,
    RunError,
)

JSON_BOMBS = {
    "brackets": b"[" * 200 * K,
    "objects": b'{"a":' * 40 * K,
    "pairs of brackets": b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "empty lists": b'{"a":[' + b"[]," * 60 * K + b"[]]}",
    "numbers": b'{"a":[' + b"1," * 120 * K + b"1]}",
    "digits": b'{"a":' + b"9" * 200 * K + b"}",
    "keys": b"{" + b",".join(b'"%d":0' % n for n in range(20 * K)) + b"}",
    "one astral character": b'{"a":"\xf0\x9f\x98\x80' + b"a" * 200 * K + b'"}',
    "escapes": b'{"a":"' + b"\\u0000" * 30 * K + b'"}',
    "quotes": b'"' * 200 * K,
    "white space": b" " * 200 * K,
}
LARGE_JSON_BOMBS = {
    "a hundred million bytes of empty lists": b'{"a":[' + b"[]," * 20_000_000 + b"[]]}",
    "fifty million bytes of numbers": b'{"a":[' + b"1," * 25_000_000 + b"1]}",
}
TOML_BOMBS = {
    "a dotted key": b"a" + b".a" * 100 * K + b" = 1",
    "a dotted table": b"[a" + b".a" * 100 * K + b"]",
    "many dotted keys": b"\n".join(b"a" + b".a" * 199 + b"%d = 1" % n for n in range(K)),
    "arrays": b"a = " + b"[" * 100 * K,
    "tables in line": b"a = " + b"{a=" * 100 * K,
    "tables": b"[[a]]\n" * 100 * K,
    "a long text": b'a = "' + b"a" * 900 * K + b'"',
    "a large file": b"#" * 100 * K * K,
    "digits": b"a = " + b"9" * 10 * K,
}
CHECK = b',"check":"0123456789abcdef"}'
JOURNAL_BOMBS = {
    "checks": CHECK * 200 * K,
    "lines": b"{}\n" * 200 * K,
    "NULs": bytes(20 * K * K),
}
LEDGER_BOMBS = {
    "brackets": b"[\n" + b"[" * 2 * K * K,
    "open texts": b"[\n" + b'{"step":1,"loss":2.0,"arm":"' * 100 * K,
    "separators": b"[\n{" + b",\n" * 2 * K * K,
    "NULs": b"[\n" + bytes(20 * K * K),
    "digits": b'[\n{"step":1,"loss":' + b"9" * 2 * K * K + b"}\n]\n",
}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def open_ledger(path: Path) -> None:
    opened = ledger.Ledger.open(path)
    tail = opened.tail(1, 2)
    for step in range(2, 6):
        tail.earlier(step)
    opened.close()


def open_journal(path: Path) -> None:
    opened, _ = journal.Journal.open(path)
    opened.close()


def bombs(home: Path) -> list[tuple[str, dict[str, bytes], Callable[[bytes], object]]]:
    return [
        ("message", JSON_BOMBS, lambda data: contract.parse_message(data, contract.ASK, "m")),
        ("receipt", JSON_BOMBS, lambda data: contract.parse_receipt(data, "r")),
        ("manifest", JSON_BOMBS, lambda data: contract.parse_manifest(data, "m")),
        ("manifest", LARGE_JSON_BOMBS, lambda data: contract.parse_manifest(data, "m")),
        (
            "status",
            JSON_BOMBS,
            lambda data: sidecars.read_status(write(home / "status.json", data).parent),
        ),
        ("samples", LARGE_JSON_BOMBS, lambda data: sidecars.read_samples(write(home / "s", data))),
        ("settings", TOML_BOMBS, lambda data: config.read_toml(write(home / "c.toml", data))),
        ("journal", JOURNAL_BOMBS, lambda data: journal.read(write(home / "j", data))),
        ("journal", JOURNAL_BOMBS, lambda data: open_journal(write(home / "j", data))),
        ("ledger", LEDGER_BOMBS, lambda data: ledger.read_entries(write(home / "l", data))),
        ("ledger", LEDGER_BOMBS, lambda data: open_ledger(write(home / "l", data))),
    ]


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    refused = 0
    with tempfile.TemporaryDirectory() as directory:
        for parser, inputs, parse in bombs(Path(directory)):
            for name, data in inputs.items():
                try:
                    with cpu_limit():
                        parse(data)
                except REFUSALS:
                    refused += 1
                except BaseException as error:
                    raise AssertionError(f"{parser}: {name}: {type(error).__name__}") from error
    print(f"{refused} bombs refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
