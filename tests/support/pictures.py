"""Pictures of pages for the documentation, made small: PNG with a palette, half of what a browser writes."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_INDEXED = 3

# Of a PNG as base64: its size, the most frequent colours that differ, and for each pixel the nearest of them.
_REDUCE = """async (data) => {
  const picture = await createImageBitmap(await (await fetch(`data:image/png;base64,${data}`)).blob());
  const {width, height} = picture;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(picture, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
  const counts = new Map();
  for (const each of pixels) counts.set(each, (counts.get(each) ?? 0) + 1);
  const parts = (each) => [each & 255, (each >> 8) & 255, (each >> 16) & 255];
  const apart = (one, other) => one.reduce((sum, each, index) => sum + (each - other[index]) ** 2, 0);
  const palette = [];
  // Hardly different ones count as one: a red word in a page of grey shades would lose its colour otherwise.
  for (const [each] of [...counts].sort((one, other) => other[1] - one[1])) {
    if (palette.length === 256) break;
    if (palette.every((known) => apart(parts(known), parts(each)) >= 100)) palette.push(each);
  }
  const known = new Map(palette.map((each, index) => [each, index]));
  const colours = palette.map(parts);
  const nearest = (each) => {
    let best = 0, least = Infinity;
    colours.forEach((colour, index) => {
      const distance = apart(colour, parts(each));
      if (distance < least) { least = distance; best = index; }
    });
    known.set(each, best);
    return best;
  };
  const indexes = Uint8Array.from(pixels, (each) => known.get(each) ?? nearest(each));
  let text = "";
  for (let at = 0; at < indexes.length; at += 32768) text += String.fromCharCode(...indexes.subarray(at, at + 32768));
  return {width, height, palette: colours.flat(), indexes: btoa(text)};
}"""


def take(page: Page, path: Path) -> None:
    """Write what is to be seen of a page as a small PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    helper = page.context.new_page()  # an empty page has no content policy that would be in the way
    try:
        found = helper.evaluate(_REDUCE, base64.b64encode(page.screenshot()).decode())
    finally:
        helper.close()
    width, height = found["width"], found["height"]
    indexes = base64.b64decode(found["indexes"])
    rows = b"".join(b"\0" + indexes[begin : begin + width] for begin in range(0, width * height, width))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, _INDEXED, 0, 0, 0)),
        (b"PLTE", bytes(found["palette"])),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    path.write_bytes(SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
