"""An RTSP camera as a process of its own: GStreamer's server, run by the system's Python; H.264, a white ball on black.

``python3 rtsp_server.py PORT WIDTH HEIGHT FPS KEYFRAME_EVERY [PASSWORD]``. Lines on stdin: ``size WIDTH HEIGHT`` changes the
resolution of the running stream.
"""

import sys
import threading

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402

PIPELINE = (
    "( videotestsrc is-live=true pattern=ball ! videoscale ! capsfilter name=size caps={caps}"
    " ! x264enc tune=zerolatency speed-preset=ultrafast threads=1 key-int-max={every}"
    " ! rtph264pay name=pay0 pt=96 config-interval=-1 )"
)
CAPS = "video/x-raw,width={},height={},framerate={}/1"


class Camera:
    def __init__(self, port, width, height, fps, every, password=None):
        self.fps, self.pipelines = fps, []
        self.server = GstRtspServer.RTSPServer()
        self.server.set_address("127.0.0.1")
        self.server.set_service(port)
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_shared(True)
        factory.set_launch(PIPELINE.format(caps=CAPS.format(width, height, fps), every=every))
        factory.connect("media-configure", lambda _, media: self.pipelines.append(media.get_element()))
        self.server.get_mount_points().add_factory("/live", factory)
        if password:
            self.lock(factory, password)
        self.server.attach(None)

    def lock(self, factory, password):
        access = Gst.Structure.new_from_string("user,media.factory.access=true,media.factory.construct=true")
        factory.add_role_from_structure(access[0] if isinstance(access, tuple) else access)
        token, auth = GstRtspServer.RTSPToken(), GstRtspServer.RTSPAuth()
        token.set_string("media.factory.role", "user")
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic("u", password), token)
        self.server.set_auth(auth)

    def obey(self):
        for line in sys.stdin:
            _, width, height = line.split()
            for pipeline in self.pipelines:
                pipeline.get_by_name("size").set_property("caps", Gst.Caps.from_string(CAPS.format(width, height, self.fps)))


if __name__ == "__main__":
    Gst.init(None)
    camera = Camera(*sys.argv[1:])
    threading.Thread(target=camera.obey, daemon=True).start()
    print(camera.server.get_bound_port(), flush=True)
    GLib.MainLoop().run()
