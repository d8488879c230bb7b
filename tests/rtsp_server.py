"""An RTSP camera as a process of its own: GStreamer's server, run by the system's Python; a track of sound, then
H.264, a white ball on black.

``python3 rtsp_server.py PORT WIDTH HEIGHT FPS KEYFRAME_EVERY [PASSWORD]``, the password of user ``u``. Lines on stdin:
``size WIDTH HEIGHT`` and ``fps N`` change the running stream, ``password WORD [PEM]`` is asked of new connections, over
TLS where there is a certificate, ``hangup`` ends all.
"""

import sys
import threading

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import Gio, GLib, Gst, GstRtspServer  # noqa: E402

PIPELINE = (
    "( audiotestsrc is-live=true ! alawenc ! rtppcmapay name=pay0 pt=8"
    " videotestsrc is-live=true pattern=ball ! videoscale ! capsfilter name=size caps={caps}"
    " ! x264enc tune=zerolatency speed-preset=ultrafast threads=1 key-int-max={every}"
    " ! rtph264pay name=pay1 pt=96 config-interval=-1 )"
)
CAPS = "video/x-raw,width={},height={},framerate={}/1"


class Camera:
    def __init__(self, port, width, height, fps, every, password=None):
        self.first = (width, height, fps)
        self.caps, self.pipeline = list(self.first), None
        self.server = GstRtspServer.RTSPServer()
        self.server.set_address("127.0.0.1")
        self.server.set_service(port)
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_shared(True)
        factory.set_launch(PIPELINE.format(caps=CAPS.format(width, height, fps), every=every))
        factory.connect("media-configure", self.configured)
        self.server.get_mount_points().add_factory("/live", factory)
        if password:
            access = Gst.Structure.new_from_string("user,media.factory.access=true,media.factory.construct=true")
            factory.add_role_from_structure(access[0] if isinstance(access, tuple) else access)
            self.lock(password)
        self.server.attach(None)

    def configured(self, _, media):
        """A client has come and there is a new stream, as it was at first."""
        self.caps[:] = self.first
        self.pipeline = media.get_element()

    def lock(self, password, certificate=None):
        token, auth = GstRtspServer.RTSPToken(), GstRtspServer.RTSPAuth()
        token.set_string("media.factory.role", "user")
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic("u", password), token)
        if certificate is not None:
            auth.set_tls_certificate(Gio.TlsCertificate.new_from_file(certificate))
        self.server.set_auth(auth)

    def obey(self):
        for line in sys.stdin:
            GLib.idle_add(self.act, *line.split())

    def act(self, word, *values):
        if word == "password":
            self.lock(*values)
        elif word == "hangup":
            self.server.client_filter(lambda *_: GstRtspServer.RTSPFilterResult.REMOVE)
        else:
            self.caps[slice(2) if word == "size" else slice(2, 3)] = values
            caps = Gst.Caps.from_string(CAPS.format(*self.caps))
            self.pipeline.get_by_name("size").set_property("caps", caps)
        return False


if __name__ == "__main__":
    Gst.init(None)
    camera = Camera(*sys.argv[1:])
    threading.Thread(target=camera.obey, daemon=True).start()
    print(camera.server.get_bound_port(), flush=True)
    GLib.MainLoop().run()
