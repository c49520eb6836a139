"""The index over gRPC.

index.proto         our own questions, and the stream of changes; index_pb2.py is made of it
kv_indexer.proto    what SGLang's gateway asks of an external index; kv_indexer_pb2.py is made of it
server.py           the server of both
"""
