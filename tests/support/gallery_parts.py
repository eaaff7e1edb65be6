"""Made-up pictures and clips behind the Recorder and Pictures services."""

import functools
import io

import av
import numpy as np
from PIL import Image, ImageDraw
from sightline.v1 import pictures_pb2, pictures_pb2_grpc

from cluster.errors import NotReadyError
from cluster.gateway.pictures_proxy import CAMERA


class Gallery(pictures_pb2_grpc.PicturesServicer, pictures_pb2_grpc.RecorderServicer):
    """A picture for every camera but ``dark``, and a snapshot and a clip, but no clip of its end, for every incident.

    ``alerts``: tells an incident's camera.
    """

    def __init__(self, alerts) -> None:
        self._alerts = alerts
        self.version = 1

    async def Picture(self, request, context):
        if request.camera == "dark":
            raise NotReadyError("camera 'dark' has shown nothing yet")
        size = min(request.width or 320, 640)
        jpeg = picture(request.camera, size, request.kept, self.version)
        return pictures_pb2.PictureReply(
            jpeg=jpeg, etag=f"{self.version}-{size}-{request.kept}", pts=5, age_s=0.5, width=size, height=size * 9 // 16
        )

    async def Live(self, request, context):
        if request.camera == "dark":
            raise NotReadyError("the camera sends no video at the moment")
        await context.write(pictures_pb2.LivePart(data=clip()))

    async def Test(self, request, context):
        if request.camera == "dark":
            raise NotReadyError("the source sends nothing")
        return pictures_pb2.TestReply(codec="h264", width=320, height=180, jpeg=picture(request.camera, 320, False, 1))

    async def Forget(self, request, context):
        return pictures_pb2.ForgetFootageReply()

    async def Footage(self, request, context):
        camera = (await self._alerts.incident(request.incident)).incident.camera
        await context.send_initial_metadata(((CAMERA, camera.encode()),))
        if request.kind == "end":
            raise NotReadyError("the clip of its end is not there")
        data = picture(camera, 320, False, 1) if request.kind == "snapshot" else clip()
        kind = "image/jpeg" if request.kind == "snapshot" else "video/mp4"
        about = pictures_pb2.FootageAbout(
            camera=camera, media_type=kind, size=len(data), etag="e1", note="it begins late"
        )
        await context.write(pictures_pb2.FootagePart(about=about))
        if not request.only_about:
            wanted = data[request.offset :][: request.length or None]
            for at in range(0, len(wanted), 1000):
                await context.write(pictures_pb2.FootagePart(data=wanted[at : at + 1000]))


@functools.lru_cache(2048)
def picture(camera: str, width: int, kept: bool, version: int) -> bytes:
    """A JPEG that is another one for every camera."""
    hue = sum(camera.encode()) * 37 % 360
    image = Image.new("RGB", (width, width * 9 // 16), f"hsl({hue}, 30%, {15 if kept else 35}%)")
    draw = ImageDraw.Draw(image)
    draw.rectangle((width // 4, 20, width // 2, 80), fill=f"hsl({hue}, 60%, 60%)")
    draw.text((8, 4), f"{camera} {version}", fill="white")
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return out.getvalue()


@functools.cache
def clip() -> bytes:
    """Two seconds of H.264 in an MP4."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}) as file:
        stream = file.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for number in range(20):
            frame = np.full((96, 160, 3), 40, np.uint8)
            frame[:, number * 8 : number * 8 + 20] = (200, 80, 60)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()
