"""Putting a whole folder, or a place in an object store, into a gallery (`gateway put`).

from nobackfill.server.bulk.filling import fill

with Gateway("127.0.0.1:50051") as gateway:
    fill(gateway, "photos", "/data/photos")
"""
