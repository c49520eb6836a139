"""The index over gRPC.

index.proto         our own queries and the stream of changes; index_pb2.py is generated from it
kv_indexer.proto    the queries of SGLang's gateway to an external index; kv_indexer_pb2.py is generated from it
server.py           the server for both
"""
