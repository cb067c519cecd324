void work_launch(float *out, float *in, int n);
