"""An ONVIF camera on a loopback address: WS-Discovery, and the SOAP calls of ``devicemgmt`` and ``media`` that a search
makes, with WS-UsernameToken digests checked (WSS UsernameToken Profile 1.0, section 3.1)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

SOAP = "http://www.w3.org/2003/05/soap-envelope"
DEVICE = "http://www.onvif.org/ver10/device/wsdl"
MEDIA = "http://www.onvif.org/ver10/media/wsdl"
MATCH = """<e:Envelope xmlns:e="{soap}" xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery"><e:Body><d:ProbeMatches>
<d:ProbeMatch><d:Types>dn:NetworkVideoTransmitter</d:Types><d:XAddrs>{url}</d:XAddrs></d:ProbeMatch>
</d:ProbeMatches></e:Body></e:Envelope>"""


@dataclass
class OnvifCamera(asyncio.DatagramProtocol):
    """Answers probes at ``host``; ``source`` is its stream. ``claimed``: the host that its addresses name;
    ``redirect``: where its service sends everybody; ``padding``: bytes of nothing in a reply. ``http_digest``: it
    wants HTTP's digest instead of WS-UsernameToken's. ``vacant``: channels to which no camera is connected, as of a
    recorder; ``connected``: whether there is a last one that has a stream."""

    source: str
    host: str = "127.0.0.1"
    probe_port: int = 0
    user: str = "admin"
    password: str = "right"
    claimed: str = ""
    redirect: str = ""
    padding: int = 0
    http_digest: bool = False
    vacant: int = 1
    connected: bool = True
    calls: list[str] = field(default_factory=list)
    probes: int = 0

    async def __aenter__(self) -> OnvifCamera:
        application = web.Application()
        application.router.add_post("/onvif/{service}", self._serve)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0).start()
        self.port = self._runner.addresses[0][1]
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(self.host, self.probe_port))
        self.probe_port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()
        await self._runner.cleanup()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        assert b"NetworkVideoTransmitter" in data
        self.probes += 1
        url = f"http://{self.claimed or self.host}:{self.port}/onvif/device_service"
        self._transport.sendto(MATCH.format(soap=SOAP, url=url).encode(), addr)

    async def _serve(self, request: web.Request) -> web.Response:
        if self.redirect:
            raise web.HTTPTemporaryRedirect(self.redirect)
        text = await request.text()
        name = re.search(r"Body>\s*<(?:\w+:)?(\w+)", text)[1]
        self.calls.append(name)
        if self.http_digest and name != "GetSystemDateAndTime":
            if not self._digested(request):
                raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Digest realm="x", nonce="n", qop="auth"'})
        elif name != "GetSystemDateAndTime" and not self._knows(text):
            return self._fault("Sender not authorized")
        if name == "GetStreamUri" and "ProfileToken>main<" not in text:
            # ter:IncompleteConfiguration (ONVIF Media Service, GetStreamUri).
            return self._fault("The specified media profile contains no video")
        return self._reply(getattr(self, f"_{name}")())

    def _fault(self, text: str) -> web.Response:
        return self._reply(
            "<s:Fault><s:Code><s:Value>s:Sender</s:Value></s:Code><s:Reason>"
            f'<s:Text xml:lang="en">{text}</s:Text></s:Reason></s:Fault>',
            400,
        )

    def _digested(self, request: web.Request) -> bool:
        """HTTP Digest (RFC 7616, section 3.4.1) with MD5."""

        def md5(text: str) -> str:
            return hashlib.md5(text.encode()).hexdigest()

        sent = dict(re.findall(r'(\w+)="?([^",]*)"?', request.headers.get("Authorization", "")))
        secret, action = md5(f"{self.user}:x:{self.password}"), md5(f"POST:{request.path}")
        parts = secret, "n", sent.get("nc", ""), sent.get("cnonce", ""), "auth", action
        return sent.get("response") == md5(":".join(parts))

    def _knows(self, text: str) -> bool:
        found = [
            re.search(rf"<(?:\w+:)?{name}(?:\s[^>]*)?>([^<]*)<", text)
            for name in ("Username", "Password", "Nonce", "Created")
        ]
        if not all(found):
            return False
        user, digest, nonce, created = (each[1] for each in found)
        expected = hashlib.sha1(base64.b64decode(nonce) + created.encode() + self.password.encode()).digest()
        return user == self.user and base64.b64decode(digest) == expected

    def _reply(self, body: str, status: int = 200) -> web.Response:
        pad = f"<!--{'x' * self.padding}-->" if self.padding else ""
        text = (
            f'<s:Envelope xmlns:s="{SOAP}" xmlns:d="{DEVICE}" xmlns:m="{MEDIA}" '
            f'xmlns:t="http://www.onvif.org/ver10/schema">{pad}<s:Body>{body}</s:Body></s:Envelope>'
        )
        return web.Response(text=text, status=status, content_type="application/soap+xml")

    def _GetSystemDateAndTime(self) -> str:
        now = datetime.now(UTC)
        return (
            "<d:GetSystemDateAndTimeResponse><d:SystemDateAndTime><t:DateTimeType>NTP</t:DateTimeType>"
            "<t:DaylightSavings>false</t:DaylightSavings><t:UTCDateTime>"
            f"<t:Time><t:Hour>{now.hour}</t:Hour><t:Minute>{now.minute}</t:Minute><t:Second>{now.second}</t:Second></t:Time>"
            f"<t:Date><t:Year>{now.year}</t:Year><t:Month>{now.month}</t:Month><t:Day>{now.day}</t:Day></t:Date>"
            "</t:UTCDateTime></d:SystemDateAndTime></d:GetSystemDateAndTimeResponse>"
        )

    def _GetServices(self) -> str:
        url = f"http://{self.claimed or self.host}:{self.port}/onvif"
        each = "".join(
            f"<d:Service><d:Namespace>{name}</d:Namespace><d:XAddr>{url}/{path}</d:XAddr>"
            "<d:Version><t:Major>2</t:Major><t:Minor>0</t:Minor></d:Version></d:Service>"
            for name, path in ((DEVICE, "device_service"), (MEDIA, "media"))
        )
        return f"<d:GetServicesResponse>{each}</d:GetServicesResponse>"

    def _GetDeviceInformation(self) -> str:
        return (
            "<d:GetDeviceInformationResponse><d:Manufacturer>Acme</d:Manufacturer><d:Model>Dome 4</d:Model>"
            "<d:FirmwareVersion>1</d:FirmwareVersion><d:SerialNumber>7</d:SerialNumber><d:HardwareId>1</d:HardwareId>"
            "</d:GetDeviceInformationResponse>"
        )

    def _GetProfiles(self) -> str:
        """A profile of metadata alone, those of vacant channels, and the camera's own."""
        video = (
            '<t:VideoEncoderConfiguration token="v"><t:Name>v</t:Name><t:UseCount>1</t:UseCount>'
            "<t:Encoding>H264</t:Encoding><t:Resolution><t:Width>1920</t:Width><t:Height>1080</t:Height></t:Resolution>"
            "<t:Quality>4</t:Quality><t:RateControl><t:FrameRateLimit>25</t:FrameRateLimit>"
            "<t:EncodingInterval>1</t:EncodingInterval><t:BitrateLimit>4096</t:BitrateLimit></t:RateControl>"
            "<t:Multicast><t:Address><t:Type>IPv4</t:Type></t:Address><t:Port>0</t:Port><t:TTL>0</t:TTL>"
            "<t:AutoStart>false</t:AutoStart></t:Multicast><t:SessionTimeout>PT60S</t:SessionTimeout>"
            "</t:VideoEncoderConfiguration>"
        )
        profiles = "".join(
            f'<m:Profiles token="{token}" fixed="true"><t:Name>{token}Stream</t:Name>{encoder}</m:Profiles>'
            for token, encoder in (
                ("metadata", ""),
                *((f"vacant{number}", video) for number in range(self.vacant)),
                *([("main", video)] if self.connected else []),
            )
        )
        return f"<m:GetProfilesResponse>{profiles}</m:GetProfilesResponse>"

    def _GetStreamUri(self) -> str:
        return (
            f"<m:GetStreamUriResponse><m:MediaUri><t:Uri>{self.source}</t:Uri>"
            "<t:InvalidAfterConnect>false</t:InvalidAfterConnect><t:InvalidAfterReboot>false</t:InvalidAfterReboot>"
            "<t:Timeout>PT0S</t:Timeout></m:MediaUri></m:GetStreamUriResponse>"
        )
