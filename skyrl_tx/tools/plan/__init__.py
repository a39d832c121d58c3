"""`skyrl-tx plan`: estimate the memory use and the speed of a model on given hardware, without using that hardware."""
