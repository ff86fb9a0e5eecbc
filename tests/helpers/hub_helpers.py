"""Stand-in for the Hugging Face hub: a local server with the few calls that pushing and loading a model make."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = hashlib.sha1(b"main").hexdigest()


@contextmanager
def local_hub():
    """Yield the server's address and its files, {path in the one repository that it has: content}."""
    files: dict[str, bytes] = {}

    class Hub(BaseHTTPRequestHandler):
        def answer(self, content, status=200, **headers):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self):
            sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if self.path == "/api/repos/create":
                self.answer({"url": f"{address}/me/{json.loads(sent)['name']}"})
            elif "/preupload/" in self.path:  # no file is sent apart
                names = [each["path"] for each in json.loads(sent)["files"]]
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                self.answer({"files": [{"path": name, **modes} for name in names]})
            elif "/commit/" in self.path:
                for value in (line["value"] for line in map(json.loads, sent.splitlines()) if line["key"] == "file"):
                    files[value["path"]] = base64.b64decode(value["content"])
                self.answer({"commitUrl": f"{address}/me/model/commit/{COMMIT}", "commitOid": COMMIT})
            else:  # the card's metadata are checked
                self.answer({})

        def do_GET(self):
            name = self.path.partition("/resolve/")[2].partition("/")[2]
            if self.path.startswith("/api/") and "/tree/" not in self.path:
                self.answer({"id": "me/model", "sha": COMMIT, "siblings": [{"rfilename": each} for each in files]})
            elif name in files:
                kind = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X_Repo_Commit": COMMIT}
                self.answer(files[name], **kind)
            else:
                self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield address, files
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
