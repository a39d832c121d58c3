"""The parts of bench_real: pretrained models, work through the SDK, and the same work with transformers and peft."""
