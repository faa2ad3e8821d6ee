"""Which roles open which methods. One of those named is enough; what is not named here is for `control` alone."""

from paged.roles import Role
from scheduler_svc.api.caller import Caller
from scheduler_svc.errors import PermissionDenied

# Probes and load balancers have no token, nor has gRPC's own health checking. It says who is alive, and no more.
OPEN_METHODS = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch"))

_GENERATE = frozenset({Role.GENERATE})
_READ = frozenset({Role.READ})
_CONTROL = frozenset({Role.CONTROL})
_FACTS = _GENERATE | _READ  # of models: whoever asks them for text needs them
_ANY = frozenset(Role)

ROLES = {
    "/paged.v1.InferenceService/Generate": _GENERATE,
    "/paged.v1.InferenceService/GenerateMany": _GENERATE,
    "/paged.v1.InferenceService/Tokenize": _GENERATE,
    "/paged.v1.InferenceService/Detokenize": _GENERATE,
    "/paged.v1.ControlService/GetModel": _FACTS,
    "/paged.v1.ControlService/ListModels": _FACTS,
    # These tell of all tenants together: how busy they are, and the hashes of what they have asked.
    "/paged.v1.ControlService/GetLoad": _READ,
    "/paged.v1.ControlService/WatchPrefixCache": _READ,
    "/paged.v1.ControlService/GetPrefixTree": _READ,
    # These tell of each request: to a tenant's token, of that tenant's alone.
    "/paged.v1.ControlService/Watch": _READ,
    "/paged.v1.ControlService/GetBlockTables": _READ,
    "/paged.v1.ControlService/Abort": _CONTROL,
    "/paged.v1.ControlService/FlushPrefixCache": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/Generate": _GENERATE,
    "/vllm.grpc.engine.VllmEngine/HealthCheck": _ANY,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": _FACTS,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": _FACTS,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": _FACTS,
    "/vllm.grpc.engine.VllmEngine/GetLoads": _READ,
    # It tells what the prompts of all tenants say.
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/Abort": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/FlushCache": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/StartProfile": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/StopProfile": _CONTROL,
    "/vllm.grpc.engine.VllmEngine/Embed": _GENERATE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _ANY,
}


def check_may_call(caller: Caller, method: str) -> None:
    """`method` as gRPC names it, /SERVICE/METHOD. Raises PermissionDenied."""
    needed = ROLES.get(method, _CONTROL)
    if not needed & caller.roles:
        wanted = " or ".join(sorted(needed))
        raise PermissionDenied(f"the token has no role that may call {method.rpartition('/')[2]}; it takes {wanted}")
