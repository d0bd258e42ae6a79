// `steps` times: every cell becomes the mean of itself and its two neighbours, around the end.
struct DiffuseArgs {
    const float* in;
    float* out;
    int steps;
};

constexpr int kThreads = 96;

AG_KERNEL(kThreads, diffuse, DiffuseArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> cells(buffer, 0, kThreads);
    int i = ag_thread(), left = ag_mod(i - 1, kThreads), right = ag_mod(i + 1, kThreads);

    cells[i] = ag_load(args.in + ag_block() * kThreads + i);
    for (int step = 0; step < args.steps; ++step) {
        ag_sync();  // written by the neighbours
        float mean = (cells[left] + cells[i] + cells[right]) / 3.0f;
        ag_sync();  // read by the neighbours
        cells[i] = mean;
    }
    ag_store(args.out + ag_block() * kThreads + i, cells[i]);
}
