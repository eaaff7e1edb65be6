"""Searches an operator-approved network for ONVIF cameras: WS-Discovery, then media profiles and stream URIs.

Nothing is sent to an address outside that network: devices are queried at the address their reply came from, whatever
addresses they announce; redirects end the request; stream URIs outside the network are discarded.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cluster.errors import ConfigError, NotReadyError
from cluster.security.limits import ConcurrencyLimit
from cluster.types.cameras import DiscoveredCamera, DiscoveredStream, Discovery

MOST_ADDRESSES = 1024
PROBES_PER_S = 200
REPLY_S = 3.0
"""Seconds to wait for replies after the last probe."""
DEVICE_S = 15.0
LONGEST_S = 120.0
"""Timeouts for querying one device, and all of them."""
MOST_DEVICES = 256
AT_ONCE = 8
MOST_PROFILES = 64
MOST_TEXT = 200
MULTICAST = "239.255.255.250"
PORT = 3702
"""Multicast address and port of WS-Discovery (OASIS 2009, section 3.1.1)."""

PROBE = """<?xml version="1.0" encoding="UTF-8"?>
<e:Envelope xmlns:e="http://www.w3.org/2003/05/soap-envelope" xmlns:w="http://schemas.xmlsoap.org/ws/2004/08/addressing"
 xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery" xmlns:dn="http://www.onvif.org/ver10/network/wsdl">
<e:Header><w:MessageID>uuid:{id}</w:MessageID><w:To>urn:schemas-xmlsoap-org:ws:2005:04:discovery</w:To>
<w:Action>http://schemas.xmlsoap.org/ws/2005/04/discovery/Probe</w:Action></e:Header>
<e:Body><d:Probe><d:Types>dn:NetworkVideoTransmitter</d:Types></d:Probe></e:Body></e:Envelope>"""
ADDRESSES = re.compile(rb"<(?:[\w.-]+:)?XAddrs[^>]*>([^<]{1,4096})<")

log = logging.getLogger(__name__)
Network = ipaddress.IPv4Network


def named_network(text: str, allowed: Sequence[Network]) -> Network:
    """Parse and authorise the network to search. Raises ``ConfigError``: not an IPv4 network, or too large;
    ``NotReadyError``: not allowed by the configuration."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise ConfigError(
            f"{text[:MOST_TEXT]!r} is not a network like 10.0.0.0/24 ({str(error)[:MOST_TEXT]})"
        ) from None
    if network.num_addresses > MOST_ADDRESSES:
        raise ConfigError(
            f"{network} has {network.num_addresses} addresses; at most {MOST_ADDRESSES} are searched at once"
        )
    if not allowed:
        raise NotReadyError("no network may be searched for cameras; name some in security.discovery_networks")
    if not any(network.subnet_of(each) for each in allowed):
        raise NotReadyError(f"{network} is not within security.discovery_networks: {', '.join(map(str, allowed))}")
    return network


class NetworkSearch:
    """Searches within ``security.discovery_networks``, one at a time per process. ``probe_port``: UDP port probed."""

    def __init__(self, allowed: Sequence[Network], *, probe_port: int = PORT) -> None:
        self._allowed, self._port = allowed, probe_port
        self._places = ConcurrencyLimit(1, "network is being searched already; try again in a moment")

    async def search(self, network: str, user: str = "", password: str = "") -> AsyncGenerator[Discovery, None]:
        """Yield progress, and cameras as they are found. Raises ``ConfigError``: see :func:`named_network`, or the
        ONVIF package is missing; ``NotReadyError``: not allowed, or too slow; ``CapacityError``: a search is running.
        """
        named = named_network(network, self._allowed)
        try:
            import onvif  # noqa: F401
        except ImportError:
            raise ConfigError("searching for cameras needs the package onvif-zeep-async on the decoders") from None
        try:
            with self._places.taken():
                log.info("searching %s for ONVIF cameras", named)
                async with contextlib.aclosing(self._search(named, user, password)) as found:
                    async for each in found:
                        yield each
        except TimeoutError:
            raise NotReadyError(
                f"the devices of {named} took longer than {LONGEST_S:g} s; name a smaller network"
            ) from None

    async def _search(self, network: Network, user: str, password: str) -> AsyncGenerator[Discovery, None]:
        replies = _Replies(network)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: replies, local_addr=("0.0.0.0", 0))
        hosts = [str(each) for each in network.hosts()]
        progress = Discovery(0, len(hosts))
        try:
            self._multicast(transport, network)
            for number, host in enumerate(hosts, 1):
                transport.sendto(_probe(), (host, self._port))
                if number % (PROBES_PER_S // 4) == 0:
                    progress = replace(progress, probed=number, answered=len(replies.urls))
                    yield progress
                    await asyncio.sleep(0.25)
            progress = replace(progress, probed=len(hosts))
            yield progress
            await asyncio.sleep(REPLY_S)
        finally:
            transport.close()
        urls = [url for _, url in sorted(replies.urls.items(), key=lambda each: ipaddress.IPv4Address(each[0]))]
        progress = replace(progress, answered=len(urls))
        yield progress
        gate = asyncio.Semaphore(AT_ONCE)
        asked = [asyncio.create_task(_ask(gate, url, network, user, password)) for url in urls]
        try:
            for number, done in enumerate(asyncio.as_completed(asked, timeout=LONGEST_S), 1):
                yield replace(progress, asked=number, camera=await done)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _multicast(self, transport: asyncio.DatagramTransport, network: Network) -> None:
        """Send one multicast probe, with TTL 1, if this machine has an address in the network."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((str(next(network.hosts())), self._port))
            own = route.getsockname()[0]
            if ipaddress.IPv4Address(own) in network:
                wire: Any = transport.get_extra_info("socket")
                wire.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
                wire.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                transport.sendto(_probe(), (MULTICAST, self._port))


class _Replies(asyncio.DatagramProtocol):
    """Collects ONVIF service URLs by the host that replied, for hosts in the network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.urls: dict[str, str] = {}

    def datagram_received(self, data: bytes, addr: Any) -> None:
        host = str(addr[0])
        if ipaddress.IPv4Address(host) not in self.network or host in self.urls or len(self.urls) >= MOST_DEVICES:
            return
        listed = ADDRESSES.search(data)
        for url in listed[1].decode(errors="replace").split() if listed else ():
            with contextlib.suppress(ValueError):
                parts = urlsplit(url)
                if parts.scheme in ("http", "https"):
                    port = parts.port or (443 if parts.scheme == "https" else 80)
                    self.urls[host] = f"{parts.scheme}://{host}:{port}"
                    return

    def error_received(self, exc: Exception) -> None:
        """Ignore ICMP errors from unused addresses."""


def _probe() -> bytes:
    return PROBE.format(id=uuid.uuid4()).encode()


async def _ask(gate: asyncio.Semaphore, url: str, network: Network, user: str, password: str) -> DiscoveredCamera:
    address = urlsplit(url).netloc
    async with gate:
        try:
            async with asyncio.timeout(DEVICE_S):
                return await _streams(url, network, user, password)
        except TimeoutError:
            return DiscoveredCamera(address, error=f"it did not answer within {DEVICE_S:g} s")
        except Exception as error:
            # A misbehaving device must not end the search.
            reason = " ".join(str(error).split())[:MOST_TEXT] or type(error).__name__
            return DiscoveredCamera(address, error=f"its ONVIF service failed: {reason}")


async def _streams(url: str, network: Network, user: str, password: str) -> DiscoveredCamera:
    from zeep.exceptions import Fault

    from cluster.decoder.onvif_device import confined_device

    address = urlsplit(url).netloc
    async with confined_device(url, user, password) as device:
        about = await (await device.create_devicemgmt_service()).GetDeviceInformation()
        media = await device.create_media_service()
        streams, elsewhere, refused = [], 0, ""
        # Profiles of sound or metadata alone have no encoder of video, and often no address.
        profiles = [each for each in await media.GetProfiles() if each.VideoEncoderConfiguration is not None]
        for profile in profiles[:MOST_PROFILES]:
            setup = {"Stream": "RTP-Unicast", "Transport": {"Protocol": "RTSP"}}
            try:
                reply = await media.GetStreamUri({"StreamSetup": setup, "ProfileToken": profile.token})
            except Fault as fault:
                # As of a recorder's channel without a camera: the others have streams.
                refused = f": {' '.join(str(fault).split())[:MOST_TEXT]}"
                continue
            source = _source(str(reply.Uri).strip(), network)
            if not source:
                elsewhere += 1
            else:
                encoder = profile.VideoEncoderConfiguration
                size, rate = encoder.Resolution, encoder.RateControl
                fps = 0.0 if rate is None else float(rate.FrameRateLimit or 0)
                name = str(profile.Name or profile.token)[:MOST_TEXT]
                streams.append(DiscoveredStream(name, str(encoder.Encoding), size.Width, size.Height, fps, source))
    error = "" if streams else f"it offers no video stream{refused}"
    if elsewhere and not streams:
        error = f"its streams are not rtsp:// addresses within {network}"
    maker, model = str(about.Manufacturer or ""), str(about.Model or "")
    name = " ".join(f"{maker} {model}".split())[:MOST_TEXT]
    return DiscoveredCamera(address, name, model[:MOST_TEXT], tuple(streams), error)


def _source(uri: str, network: Network) -> str:
    """The stream's URL without credentials; empty unless it is RTSP within the network."""
    try:
        parts = urlsplit(uri)
        if parts.scheme not in ("rtsp", "rtsps") or ipaddress.IPv4Address(parts.hostname or "") not in network:
            return ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    return urlunsplit(parts._replace(netloc=f"{parts.hostname}{port}"))
