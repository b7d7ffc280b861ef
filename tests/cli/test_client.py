"""What is sent for a clip, and what is made of answers that are no clip."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from vllm_h3_quant.cli.client import ClipRequest, RequestError, request_clip

REQUEST = ClipRequest(prompt="@home <now>", width=64, height=32, seed=11)


@dataclass
class Answer:
    """What the stub answers, and what it was sent."""

    status: int = 200
    kind: str = "video/mp4"
    body: bytes = b"clip"
    url: str = ""
    received: list[tuple[str, str, bytes]] = field(default_factory=list)


@pytest.fixture
def answer() -> Iterator[Answer]:
    chosen = Answer()

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            chosen.received.append((self.path, self.headers["content-type"], body))
            self.send_response(chosen.status)
            self.send_header("content-type", chosen.kind)
            self.end_headers()
            self.wfile.write(chosen.body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Stub)
    chosen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield chosen
    server.shutdown()
    thread.join()
    server.server_close()


def fields(kind: str, body: bytes) -> dict[str, str]:
    from email.parser import BytesParser

    message = BytesParser().parsebytes(b"content-type: " + kind.encode() + b"\r\n\r\n" + body)
    parts = message.get_payload()
    assert isinstance(parts, list)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True).decode()
        for part in parts
    }


def test_clip_is_saved_and_every_field_sent(answer: Answer, tmp_path: Path) -> None:
    request_clip(answer.url, REQUEST, tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").read_bytes() == b"clip"
    ((path, kind, body),) = answer.received
    assert path == "/v1/videos/sync"
    sent = fields(kind, body)
    codec = json.loads(sent.pop("extra_params"))["video_codec_options"]
    assert codec["crf"] == str(REQUEST.crf)
    assert sent == {
        "prompt": "@home <now>",
        "width": "64",
        "height": "32",
        "num_frames": "96",
        "fps": "24",
        "num_inference_steps": "4",
        "seed": "11",
        "aspect_ratio": "1:1",
    }


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (
            400,
            "application/json",
            b'{"detail":\n "aspect_ratio is required"}',
            "answered 400 .*aspect_ratio is required",
        ),
        (200, "text/html", b"<html>a proxy</html>", "answered 200 .*a proxy"),
        (500, "video/mp4", b"xx", "answered 500 .*2 bytes"),
    ],
)
def test_answers_that_are_no_clip_are_told_in_one_line(
    answer: Answer, tmp_path: Path, status: int, kind: str, body: bytes, message: str
) -> None:
    answer.status, answer.kind, answer.body = status, kind, body
    with pytest.raises(RequestError, match=message) as caught:
        request_clip(answer.url, REQUEST, tmp_path / "clip.mp4")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "clip.mp4").exists()


def test_no_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="did not answer"):
        request_clip("http://127.0.0.1:9", REQUEST, tmp_path / "clip.mp4")
