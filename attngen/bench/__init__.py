"""Times beside other libraries: for `attngen bench`, and for the benchmarks of this repository."""
