"""A Kubernetes API server as far as Camera resources and Secrets go: list in pages, watch, bookmarks, status, TLS and a
bearer token; and trouble on demand: expired versions, lines cut in the middle, conflicts, slowness, refusals."""

import base64
import copy
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

GROUP = "/apis/sightline.io/v1alpha1/namespaces/yard/cameras"
RAY = "/apis/ray.io/v1/namespaces/yard/rayclusters/"
RAY_SERVICES = "/apis/ray.io/v1/namespaces/yard/rayservices/"
SECRETS = "/api/v1/namespaces/yard/secrets/"
TOKEN = "the-service-account's-token"


class KubeServer:
    """Objects, their history, and what goes wrong. ``kubeconfig``: a file for a client of it."""

    def __init__(self, folder, authority=None, token=TOKEN):
        self.lock = threading.Condition()
        self.objects = {}
        self.secrets = {}
        self.version = 0
        self.history = []
        self.oldest = 0
        self.serial = 0
        self.token = token
        self.refuse = {}
        self.conflicts = 0
        self.status_writes = []
        self.ray_clusters = {}
        self.ray_services = {}
        self.kuberay_s = 0.0
        self.lists = self.watches = 0
        self.delay_s = 0.0
        self.cut_after = None
        self.cuts = 0
        self.garbage = None
        self.bookmark_s = 0.05
        self.page = None
        self.closing = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        scheme = "http"
        if authority is not None:
            scheme = "https"
            certificate, key = authority.issue(folder, "apiserver")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}"
        cluster = {"server": self.url}
        if authority is not None:
            cluster["certificate-authority"] = str(authority.write(folder / "ca.crt"))
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig(cluster, self.token)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def write_kubeconfig(self, cluster, token):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me", "namespace": "yard"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def close(self):
        with self.lock:
            self.closing = True
            self.lock.notify_all()
        self.server.shutdown()
        self.server.server_close()

    # -- what a user does -----------------------------------------------------------------------
    def apply(self, name, spec, *, takeover=False):
        """Create or change."""
        with self.lock:
            old = self.objects.get(name)
            self.serial += 1
            metadata = {"name": name, "namespace": "yard", "uid": f"uid-{self.serial}", "generation": 1}
            if old is not None:
                metadata = copy.deepcopy(old["metadata"])
                metadata["generation"] += old["spec"] != spec
            metadata.pop("annotations", None)
            if takeover:
                metadata["annotations"] = {"sightline.io/takeover": "true"}
            body = {"apiVersion": "sightline.io/v1alpha1", "kind": "Camera", "metadata": metadata, "spec": spec}
            if old is not None and "status" in old:
                body["status"] = old["status"]
            self._store("MODIFIED" if old else "ADDED", body)

    def delete(self, name):
        with self.lock:
            if name in self.objects:
                self._store("DELETED", copy.deepcopy(self.objects[name]))

    def secret(self, name, **values):
        self.secrets[name] = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}

    def expire(self):
        """Forget the history, as an API server does after some minutes: watches from before are 410 Gone."""
        with self.lock:
            self.history.clear()
            self.version += 1
            self.oldest = self.version
            self.cuts += 1
            self.lock.notify_all()

    def disconnect(self):
        """Cut every watch."""
        with self.lock:
            self.cuts += 1
            self.lock.notify_all()

    def status(self, name):
        with self.lock:
            return copy.deepcopy(self.objects[name].get("status", {}))

    def condition(self, name, kind):
        found = [each for each in self.status(name).get("conditions", []) if each["type"] == kind]
        return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else None

    def _store(self, kind, body):
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.objects[body["metadata"]["name"]]
        else:
            self.objects[body["metadata"]["name"]] = body
        self.history.append((self.version, kind, copy.deepcopy(body)))
        self.lock.notify_all()

    # -- what a client asks ---------------------------------------------------------------------
    def _handler(kube):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.answer(kube.get)

            def do_PUT(self):
                self.answer(kube.put)

            def do_PATCH(self):
                self.answer(kube.patch)

            def do_DELETE(self):
                self.answer(kube.remove)

            def answer(self, call):
                address = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(address.query).items()}
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                kind = address.path.rpartition("/")[2] if self.command == "PUT" else query.get("watch", "list")
                kind = "delete" if self.command == "DELETE" else kind
                scheme, _, token = self.headers.get("Authorization", "").partition(" ")
                if scheme.lower() != "bearer" or token != kube.token:
                    return self.say(401, {"kind": "Status", "code": 401})
                if kube.refuse.get(kind):
                    code = kube.refuse[kind].pop(0)
                    return self.say(code, {"kind": "Status", "code": code})
                time.sleep(kube.delay_s)
                try:
                    return call(self, address.path, query, body)
                except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
                    self.close_connection = True

            def say(self, code, body):
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def chunk(self, data):
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        return Handler

    def get(self, handler, path, query, _body):
        if path.startswith(SECRETS):
            name = path.removeprefix(SECRETS)
            if name not in self.secrets:
                return handler.say(404, {"kind": "Status", "code": 404})
            return handler.say(200, {"kind": "Secret", "metadata": {"name": name}, "data": self.secrets[name]})
        if path == RAY.removesuffix("/"):
            label = query["labelSelector"].removeprefix("ray.io/originated-from-cr-name=")
            items = [{"metadata": {"name": name}} for name in self.ray_clusters if name.startswith(f"{label}-")]
            return handler.say(200, {"kind": "RayClusterList", "items": items})
        if path.startswith(RAY_SERVICES):
            body = self.ray_services.get(path.removeprefix(RAY_SERVICES))
            return handler.say(200, body) if body else handler.say(404, {"kind": "Status", "code": 404})
        if path.startswith(RAY):
            body = self.ray_clusters.get(path.removeprefix(RAY))
            return handler.say(200, body) if body else handler.say(404, {"kind": "Status", "code": 404})
        if path != GROUP:
            name = path.removeprefix(GROUP + "/")
            with self.lock:
                body = copy.deepcopy(self.objects.get(name))
            return handler.say(200, body) if body else handler.say(404, {"kind": "Status", "code": 404})
        if query.get("watch"):
            self.watches += 1
            return self.follow(handler, int(query["resourceVersion"]))
        self.lists += 1
        with self.lock:
            names = sorted(self.objects)
            begin = int(query.get("continue", "0"))
            count = min(int(query["limit"]), self.page or len(names) or 1)
            items = [copy.deepcopy(self.objects[name]) for name in names[begin : begin + count]]
            metadata = {"resourceVersion": str(self.version)}
            if begin + count < len(names):
                metadata["continue"] = str(begin + count)
        return handler.say(200, {"kind": "CameraList", "metadata": metadata, "items": items})

    def remove(self, handler, path, _query, _body):
        """A RayService; its clusters go when KubeRay lets them."""
        if self.ray_services.pop(path.removeprefix(RAY_SERVICES), None) is None:
            return handler.say(404, {"kind": "Status", "code": 404})
        threading.Timer(self.kuberay_s, self.ray_clusters.clear).start()
        return handler.say(200, {"kind": "Status", "code": 200})

    def patch(self, handler, path, _query, body):
        """RFC 6902, as far as ``test`` and ``add`` go, all or nothing."""
        after = copy.deepcopy(self.ray_clusters[path.removeprefix(RAY)])
        if self.conflicts:
            # Somebody puts a group in front between the reading and the writing.
            self.conflicts -= 1
            after["spec"]["workerGroupSpecs"].insert(0, {"groupName": f"new-{self.conflicts}"})
            self.ray_clusters[path.removeprefix(RAY)] = copy.deepcopy(after)
        if handler.headers["Content-Type"] != "application/json-patch+json":
            return handler.say(415, {"kind": "Status", "code": 415})
        for change in json.loads(body):
            *parents, key = change["path"].split("/")[1:]
            node = after
            for parent in parents:
                node = node[int(parent)] if isinstance(node, list) else node[parent]
            if change["op"] == "add":
                node[key] = change["value"]
            elif change["op"] != "test" or node.get(key) != change["value"]:
                return handler.say(422, {"kind": "Status", "code": 422, "message": "the patch cannot be applied"})
        self.ray_clusters[path.removeprefix(RAY)] = after
        return handler.say(200, after)

    def put(self, handler, path, _query, body):
        name = path.removeprefix(GROUP + "/").removesuffix("/status")
        given = json.loads(body)
        with self.lock:
            known = self.objects.get(name)
            if known is None:
                return handler.say(404, {"kind": "Status", "code": 404})
            if self.conflicts:
                # Somebody labels the object between its reading and the writing.
                self.conflicts -= 1
                labelled = copy.deepcopy(known)
                labelled["metadata"]["labels"] = {"turn": str(self.version)}
                self._store("MODIFIED", labelled)
                known = labelled
            if given["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
                return handler.say(409, {"kind": "Status", "code": 409, "reason": "Conflict"})
            after = {**copy.deepcopy(known), "status": given["status"]}
            self._store("MODIFIED", after)
            self.status_writes.append((name, given["status"]))
            return handler.say(200, after)

    def follow(self, handler, since):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.close_connection = True
        sent, cuts, told = since, self.cuts, 0
        mine = self.watches
        while True:
            with self.lock:
                if sent < self.oldest:
                    return self.end(handler, {"type": "ERROR", "object": {"kind": "Status", "code": 410}})
                news = [each for each in self.history if each[0] > sent]
                if not news and not self.closing and cuts == self.cuts:
                    self.lock.wait(self.bookmark_s)
                    news = [each for each in self.history if each[0] > sent]
                if self.closing or cuts != self.cuts:
                    return None
                newest = self.version
                garbage = None
                if mine == self.watches:
                    # Not to one whose client has gone, and which does not know that yet.
                    garbage, self.garbage = self.garbage, None
            for version, kind, body in news:
                line = json.dumps({"type": kind, "object": body}).encode() + b"\n"
                if self.cut_after is not None and told >= self.cut_after:
                    self.cut_after = None
                    handler.chunk(line[: len(line) // 2])
                    handler.wfile.flush()
                    return handler.connection.close()
                half = len(line) // 3
                handler.chunk(line[:half])
                handler.chunk(line[half:])
                sent, told = version, told + 1
            if garbage is not None:
                handler.chunk(garbage)
            if not news:
                mark = {"kind": "Camera", "metadata": {"resourceVersion": str(newest)}}
                handler.chunk(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
                sent = newest
            handler.wfile.flush()

    def end(self, handler, event):
        handler.chunk(json.dumps(event).encode() + b"\n")
        handler.chunk(b"")
