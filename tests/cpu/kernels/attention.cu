// Attention, fp32, head dim 64: one block a tile of 64 rows of one head, 256 threads as 16 x 16,
// four by four elements a thread.  Only what the tests and the speed sample need.
struct AttentionArgs {
    const float* q;
    const float* k;
    const float* v;
    float* out;
    float* lse;
    int rows, keys, row_tiles;  // of one head
    float scale;
};

constexpr int kTile = 64, kDim = 64, kPitch = kDim + 1, kThreads = 256, kPer = 4, kSide = 16;

// rows [first, first + kTile) of a matrix with kDim columns -> tile; rows past the end are 0
AG_DEVICE void load_tile(ag_shared<float> tile, const float* matrix, int first, int count) {
    for (int i = ag_thread(); i < kTile * kDim; i += kThreads) {
        int row = i / kDim, column = i % kDim;
        const float* place = matrix + (first + row) * kDim + column;
        tile[row * kPitch + column] = first + row < count ? ag_load(place) : 0.0f;
    }
}

AG_KERNEL(kThreads, attention, AttentionArgs) {
    AG_SHARED_MEMORY(buffer);
    constexpr int kTileBytes = kTile * kPitch * 4;
    ag_shared<float> q_tile(buffer, 0, kTile * kPitch);
    ag_shared<float> k_tile(buffer, kTileBytes, kTile * kPitch);
    ag_shared<float> v_tile(buffer, 2 * kTileBytes, kTile * kPitch);
    ag_shared<float> p_tile(buffer, 3 * kTileBytes, kTile * kPitch);

    int head = ag_block() / args.row_tiles;
    int first_row = ag_block() % args.row_tiles * kTile;
    const float* q = args.q + head * args.rows * kDim;
    const float* k = args.k + head * args.keys * kDim;
    const float* v = args.v + head * args.keys * kDim;
    int ty = ag_thread() / kSide, tx = ag_thread() % kSide;

    float acc[kPer][kPer], row_max[kPer], row_sum[kPer];
    for (int i = 0; i < kPer; ++i) {
        row_max[i] = -AG_INFINITY;
        row_sum[i] = 0.0f;
        for (int j = 0; j < kPer; ++j) acc[i][j] = 0.0f;
    }

    load_tile(q_tile, q, first_row, args.rows);
    for (int first_key = 0; first_key < args.keys; first_key += kTile) {
        load_tile(k_tile, k, first_key, args.keys);
        load_tile(v_tile, v, first_key, args.keys);
        ag_sync();

        float s[kPer][kPer];
        for (int i = 0; i < kPer; ++i)
            for (int j = 0; j < kPer; ++j) s[i][j] = 0.0f;
        for (int d = 0; d < kDim; ++d) {
            float a[kPer], b[kPer];
            #pragma unroll
            for (int i = 0; i < kPer; ++i) a[i] = q_tile[(ty * kPer + i) * kPitch + d];
            #pragma unroll
            for (int j = 0; j < kPer; ++j) b[j] = k_tile[(tx + j * kSide) * kPitch + d];
            #pragma unroll
            for (int i = 0; i < kPer; ++i)
                for (int j = 0; j < kPer; ++j) s[i][j] = ag_fma(a[i], b[j], s[i][j]);
        }

        #pragma unroll
        for (int i = 0; i < kPer; ++i) {
            float tile_max = -AG_INFINITY;
            for (int j = 0; j < kPer; ++j) {
                bool inside = first_key + tx + j * kSide < args.keys;
                s[i][j] = inside ? s[i][j] * args.scale : -AG_INFINITY;
                tile_max = ag_max(tile_max, s[i][j]);
            }
            for (int mask = 8; mask > 0; mask /= 2)
                tile_max = ag_max(tile_max, ag_shuffle_xor(tile_max, mask));
            float new_max = ag_max(row_max[i], tile_max);
            float rescale = ag_exp(row_max[i] - new_max);
            row_max[i] = new_max;
            float sum = 0.0f;
            for (int j = 0; j < kPer; ++j) {
                float p = ag_exp(s[i][j] - new_max);
                p_tile[(ty * kPer + i) * kPitch + tx + j * kSide] = p;
                sum += p;
            }
            for (int mask = 8; mask > 0; mask /= 2) sum += ag_shuffle_xor(sum, mask);
            row_sum[i] = row_sum[i] * rescale + sum;
            for (int j = 0; j < kPer; ++j) acc[i][j] *= rescale;
        }
        ag_sync_warp();  // the rows of a warp's p_tile are its own

        for (int n = 0; n < kTile; ++n) {
            float a[kPer], b[kPer];
            #pragma unroll
            for (int i = 0; i < kPer; ++i) a[i] = p_tile[(ty * kPer + i) * kPitch + n];
            #pragma unroll
            for (int j = 0; j < kPer; ++j) b[j] = v_tile[n * kPitch + tx + j * kSide];
            #pragma unroll
            for (int i = 0; i < kPer; ++i)
                for (int j = 0; j < kPer; ++j) acc[i][j] = ag_fma(a[i], b[j], acc[i][j]);
        }
        ag_sync();
    }

    for (int i = 0; i < kPer; ++i) {
        int row = first_row + ty * kPer + i;
        if (row < args.rows) {
            for (int j = 0; j < kPer; ++j)
                ag_store(args.out + (head * args.rows + row) * kDim + tx + j * kSide,
                         acc[i][j] / row_sum[i]);
            float lse = row_max[i] + ag_log(row_sum[i]);
            if (tx == 0) ag_store(args.lse + head * args.rows + row, lse);
        }
    }
}
