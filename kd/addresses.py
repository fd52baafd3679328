"""Names of models and texts, hub ids, and the network addresses of hosts that a job may name."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from kd.errors import ConfigError

#: The form of a model's id on the hub: name or owner/name.
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?\Z")

#: The formats of text by the suffix of a file.
SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
#: The suffixes of compressed files, which stand after that of the format, and the kinds that they
#: promise.
PACKED = {".gz": "gzip", ".zst": "zstd"}

#: A host, an address or a network, and a port behind it.
_PORT = re.compile(r"(\[[^]]*\]|[^:]*):(\d+)")
#: Networks that look public and are not: a cloud's address for its own machines, and protocols'
#: addresses.
_SPECIAL = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24")))

#: The networks that ``localhost`` in a list of hosts stands for.
_LOOPBACK = ("127.0.0.0/8", "::1/128")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class ModelSource:
    """The name of a model, and which of its files are read.

    ``name`` is a local folder, a hub id or the folder of a bucket. ``gguf_file`` is read in place
    of safetensors. ``trust_remote_code`` asks for the model's own Python code, which the operator
    must allow too. Without ``has_weights`` only the tokenizer is read.
    """

    name: str
    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False
    has_weights: bool = True

    @property
    def weights(self) -> str | None:
        """The pattern of the files with weights that are downloaded; None for a tokenizer alone."""
        return self.gguf_file or ("*.safetensors" if self.has_weights else None)


def find_suffix(path: PurePath) -> str:
    """Return the suffix that shows a file's format, without that of its compression after it."""
    whole = path.name if find_packing(path) == "" else path.stem
    return PurePath(whole).suffix.lower()


def find_packing(path: PurePath) -> str:
    """Return the suffix of a file's compression, or nothing."""
    suffix = path.suffix.lower()
    return suffix if suffix in PACKED else ""


def names_text(path: str) -> bool:
    """Return whether ``path`` is that of a file of text, or of no form that an id of a hub has."""
    return not HUB_ID.match(path) or find_suffix(PurePath(path)) in SUFFIXES


def resolve_public_address(host: str, allowed: Iterable[str], port: int | None = None) -> str:
    """Return the address of ``host``. Connect to this address: a second look-up may give another.

    ``allowed`` holds host names, addresses and networks (``10.0.0.0/8``); ``localhost`` also stands
    for the loopback networks. An entry may end with a port (``host:8000``), and then allows no
    other ``port``. The host must be in ``allowed``. Each of its addresses must be public
    or in ``allowed`` itself, so that no name leads by accident to a private network, to this
    machine or to a cloud's metadata. Raises ``ConfigError``.
    """
    entries = map(_split_port, allowed)
    names = {name.strip("[]").rstrip(".").lower() for name, own in entries if own in (None, port)}
    networks = list(_parse_networks(names))
    plain = host.strip("[]").rstrip(".").lower()
    literal = _parse_address(plain)
    if plain not in names and not (literal is not None and _is_within(literal, networks)):
        remedy = "KD_REMOTE_HOSTS lists the allowed hosts, and KD_WEBHOOK_HOSTS those of webhooks."
        raise ConfigError.of_field("", f"the operator does not allow the host {host}.", remedy)
    addresses = [literal] if literal is not None else _look_up(plain)
    for address in addresses:
        if not _is_public(address) and not _is_within(address, networks):
            detail = f"{host} has the address {address}, which is not public."
            remedy = "To allow it, the operator must list that address itself, too."
            raise ConfigError.of_field("", detail, remedy)
    return str(addresses[0])


def _split_port(name: str) -> tuple[str, int | None]:
    found = _PORT.fullmatch(name.strip())
    return (found[1], int(found[2])) if found else (name.strip(), None)


def _parse_networks(names: set[str]) -> Iterator[Network]:
    for name in (*names, *(_LOOPBACK if "localhost" in names else ())):
        with suppress(ValueError):  # the name of a host
            yield ipaddress.ip_network(name, strict=False)


def _parse_address(host: str) -> IPAddress | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _look_up(host: str) -> list[IPAddress]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        detail = f"the host {host} is not found: {error}."
        remedy = "Check the name, and the server's resolver."
        raise ConfigError.of_field("", detail, remedy) from None
    return [ipaddress.ip_address(address[4][0]) for address in found]


def _is_within(address: IPAddress, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _is_public(address: IPAddress) -> bool:
    """Whether the address belongs to the public internet; addresses that wrap others do not."""
    if isinstance(address, ipaddress.IPv6Address) and (
        address.sixtofour or address.teredo or address.is_reserved
    ):
        return False
    return address.is_global and not address.is_multicast and not _is_within(address, _SPECIAL)
