"""One clip over HTTP: ``POST /v1/videos/sync``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

_MP4 = "video/mp4"


class RequestError(RuntimeError):
    """The server answered with something other than a clip, or not at all. The message is one line."""


@dataclass(frozen=True)
class ClipRequest:
    """Form fields of a text-to-video-and-audio request; H3 needs an aspect ratio and at least 4 s.

    Attributes:
        crf: constant rate factor of the server's H.264 encoder, which takes 18 by itself. A comparison of clips
            wants less: at 18 the encoder's own error hides that of 8-bit linears.
    """

    prompt: str
    width: int
    height: int
    num_frames: int = 96
    fps: int = 24
    num_inference_steps: int = 4
    seed: int = 7
    aspect_ratio: str = "1:1"
    crf: int = 2

    def form(self) -> dict[str, str]:
        """The fields as the server wants them."""
        fields = {name: str(value) for name, value in asdict(self).items()}
        codec = {"preset": "veryfast", "crf": fields.pop("crf")}
        return {**fields, "extra_params": json.dumps({"video_codec_options": codec})}


def request_clip(url: str, request: ClipRequest, target: Path, *, timeout: float = 1800.0) -> None:
    """Ask the server at ``url`` for a clip and save it as ``target``.

    Args:
        url: base URL, without ``/v1``.
        request: what to generate.
        target: MP4 to write.
        timeout: seconds for the whole request.

    Raises:
        RequestError: no answer, an error status (with the server's message), or no MP4.
    """
    endpoint = f"{url}/v1/videos/sync"
    form = {name: (None, value) for name, value in request.form().items()}
    try:
        response = requests.post(endpoint, files=form, timeout=timeout)
    except requests.RequestException as error:
        raise RequestError(f"{endpoint} did not answer: {error}") from error
    kind = response.headers.get("content-type", "")
    if not response.ok or not kind.startswith(_MP4):
        answer = " ".join(response.text[:500].split()) if _MP4 not in kind else f"{len(response.content)} bytes"
        raise RequestError(f"{endpoint} answered {response.status_code} ({kind or 'no type'}): {answer}")
    target.write_bytes(response.content)
