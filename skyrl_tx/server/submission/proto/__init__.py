"""The binary half of the wire; `make proto` regenerates wire_pb2 from wire.proto."""
