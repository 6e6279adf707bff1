"""Import names of earlier versions; `distrun_runtime.ops` has the code."""
