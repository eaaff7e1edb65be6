"""A collector that speaks OTLP over gRPC and keeps the spans it gets."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``spans``: by arrival. While ``held`` is set, exports wait until it is cleared."""

    def __init__(self):
        self.spans = []
        self.processes = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request, context):
        self.go_on.wait(20)
        for resource in request.resource_spans:
            self.processes |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.instance.id"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def close(self):
        self.go_on.set()
        self._server.stop(0).wait()
