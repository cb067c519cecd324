"""Programs that prove the rules on a real GPU under Nsight Systems."""
