"""`paged-scheduler-health`: asks a scheduler how it is, for what starts, probes and restarts containers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paged.credentials import tls_credentials
from scheduler_svc.api.health import LIVE, READY

SERVICES = {"live": LIVE, "ready": READY}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the scheduler says so, 1 if it says something else or nothing; bad flags exit with 2."""
    flags = _parser().parse_args(arguments)
    try:
        status = _ask(flags)
    except grpc.RpcError as error:
        print(f"{flags.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"paged-scheduler-health: {error}", file=sys.stderr)
        return 2
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


def _ask(flags: argparse.Namespace) -> int:
    pair = (flags.tls_certificate, flags.tls_private_key)
    if flags.tls_root is None and not any(pair):
        channel = grpc.insecure_channel(flags.address)
    else:
        channel = grpc.secure_channel(flags.address, tls_credentials(flags.tls_root, *pair))
    with channel:
        request = health_pb2.HealthCheckRequest(service=SERVICES[flags.service])
        response: health_pb2.HealthCheckResponse = health_pb2_grpc.HealthStub(channel).Check(
            request, timeout=flags.timeout_s
        )
        return response.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paged-scheduler-health", description="Ask a scheduler how it is.")
    parser.add_argument("--address", default="127.0.0.1:50051", help="HOST:PORT; the health service asks for no token.")
    parser.add_argument(
        "--service",
        choices=sorted(SERVICES),
        default="ready",
        help="live: restart what fails. ready: an executor is attached, and requests can be answered.",
    )
    parser.add_argument("--timeout-s", type=float, default=3.0, help="Seconds for the answer.")
    parser.add_argument("--tls-root", type=Path, help="PEM file of the CA that the scheduler's certificate is from.")
    parser.add_argument("--tls-certificate", type=Path, help="PEM file of a certificate, where one must be shown.")
    parser.add_argument("--tls-private-key", type=Path, help="PEM file of that certificate's private key.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
