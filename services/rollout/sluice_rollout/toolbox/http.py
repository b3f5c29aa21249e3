"""Pages of hosts that the job names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from sluice_rollout.toolbox.base import body_of, definition_of, shortened

_REDIRECTS = 3
_MOVED = (301, 302, 303, 307, 308)


@dataclass(slots=True)
class Http:
    """The tool `fetch`: the text behind an address, by GET.

    hosts: names, with a port where that is not the scheme's own, that may be asked; no other is,
    not by a redirect either. headers: for all of them. seconds: of a call. most_bytes: of a body.
    longest: characters of an answer.
    """

    hosts: Sequence[str]
    name: str = "fetch"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 10.0
    most_bytes: int = 1 << 20
    longest: int = 8192
    definition: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        text = f"Fetch the text behind an address. Hosts: {', '.join(self.hosts)}."
        self.definition = definition_of(self.name, text, url="The address.")

    def session(self) -> Callable[..., Any]:
        """The requests themselves: they keep nothing, no cookies either."""
        return self.fetch

    async def fetch(self, url: str) -> str:
        """The text behind an address, or why there is none."""
        limit = aiohttp.ClientTimeout(total=self.seconds)
        jar = aiohttp.DummyCookieJar()
        try:
            async with aiohttp.ClientSession(
                timeout=limit, headers=self.headers, cookie_jar=jar
            ) as session:
                return shortened(await self._text(session, str(url)), self.longest)
        except TimeoutError:
            return f"error: no answer after {self.seconds:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"

    async def _text(self, session: aiohttp.ClientSession, url: str) -> str:
        for _ in range(_REDIRECTS + 1):
            if refusal := self._refusal(url):
                return refusal
            async with session.get(url, allow_redirects=False) as response:
                if response.status in _MOVED and "Location" in response.headers:
                    url = urljoin(url, response.headers["Location"])
                    continue
                data = await body_of(response, self.most_bytes)
                text = data.decode(response.charset or "utf-8", "replace")
                return text if response.ok else f"error: HTTP {response.status}: {text}"
        return f"error: more than {_REDIRECTS} redirects"

    def _refusal(self, url: str) -> str:
        """Why an address is not asked; "" where it is."""
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or "@" in address.netloc:
            return "error: expected an address http://HOST/... or https://HOST/..."
        if address.netloc.lower() not in {host.lower() for host in self.hosts}:
            return f"error: {address.netloc} may not be asked; these may: {', '.join(self.hosts)}"
        return ""
