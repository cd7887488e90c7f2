"""A notifier that POSTs what it reads on stdin: `python -m supervisor.webhook [--file PATH]`.

A process of its own, because a name that does not resolve or a server that does not answer holds
up whoever asks. What may live here: one request, and the words for its failure.

Invariants:
- No message repeats more of the URL than its host.
- http and https only, and no redirect is followed: it would turn the POST into a GET of another
  place, and call that a success.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import IO, Final

from supervisor.channels import ENV_WEBHOOK, ChannelError, check_url, read_url
from supervisor.contract import ExitCode

TIMEOUT_SECONDS: Final = 20.0


def url_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Raises ChannelError where there is none."""
    match arguments:
        case ["--file", path]:
            return read_url(Path(path))
        case [] if ENV_WEBHOOK in environment:
            return check_url(environment[ENV_WEBHOOK], ENV_WEBHOOK)
        case _:
            raise ChannelError(
                "usage: python -m supervisor.webhook [--file PATH]; without a file the URL is in"
                f" {ENV_WEBHOOK}"
            )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> None:
        """None: the redirect is an error, like any other answer that is not a success."""


def post(url: str, body: bytes) -> None:
    """One POST. Raises OSError, HTTPException or ValueError where it was not taken."""
    request = urllib.request.Request(
        url,
        data=body,
        headers={"Content-Type": "application/json", "User-Agent": "trainer-supervisor"},
        method="POST",
    )
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(request, timeout=TIMEOUT_SECONDS):
        return


def main() -> int:
    try:
        url = url_of(sys.argv[1:], os.environ)
    except ChannelError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    host = url.split("/")[2].rpartition("@")[2]
    try:
        post(url, sys.stdin.buffer.read())
    except urllib.error.HTTPError as error:
        with error:
            print(f"{host} answered {error.code} {error.reason}", file=sys.stderr)
        return ExitCode.FAILED
    except (OSError, HTTPException, ValueError) as error:
        # ValueError: a host that can be none, a port that is no number.
        print(f"{host} was not reached: {error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
