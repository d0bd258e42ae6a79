// Forward attention as it is fast on sm_90a, small: one block walks query tiles; a lane of its first warp group
// loads, the others have 64 query rows each.
//   - In every step a warp group starts q k^T of this step and then the product with v of the step before, so that the
//     tensor cores have that to do while the softmax of this step is computed.  Warp groups start them in turn.
//   - The steps run on over the ends of tiles: the first q k^T of a tile is started before the last product with v of the
//     tile before, which is normalized and stored while the new one is under way.
constexpr int kHeadDim = 128;
constexpr int kKeys = 64;  // of a step
constexpr int kGroups = 2, kThreads = 128 * (kGroups + 1), kStages = 2, kBlocks = kHeadDim / 64;  // of 64 columns
constexpr int kEarly = 3;  // of the kKeys / 16 parts of the product with v; the others come behind the row maxima
constexpr bool kCausal = true;

// Shared memory.
constexpr int kSlabBytes = 64 * kHeadDim * 2, kStageBytes = kKeys * kHeadDim * 2, kOutBytes = 16 * 64 * 2;
constexpr int kQ = 0, kK = kQ + kGroups * kSlabBytes, kV = kK + kStages * kStageBytes, kOut = kV + kStages * kStageBytes;
constexpr int kQFull = kOut + 4 * kGroups * kOutBytes, kQEmpty = kQFull + 8 * kGroups;
constexpr int kKFull = kQEmpty + 8 * kGroups, kKEmpty = kKFull + 8 * kStages;
constexpr int kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
constexpr int kRecords = kVEmpty + 8 * kStages;  // 16 bytes for each warp group: the tile that q is of

constexpr ag_u32 kHigh = ag_matrix_high(kSwizzle128, 1024);

struct ForwardArgs {
    ag_tensor_map q, k, v, out;
    float* lse;  // [batches][heads][rows]
    int rows, keys, heads, share, row_tiles, tiles;  // share: query heads of a key head; tiles: of a block
    float scale, scale_log2;
};

struct Tile {
    int row_tile, head, batch, steps;
};

// A place in a ring of stages, and the parity of its phase.
struct Place {
    int stage, parity;
    AG_DEVICE void move() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

AG_DEVICE int last_key(const ForwardArgs& args, int row) {  // behind the last that this row may see
    return kCausal ? ag_min(args.keys, row + 1 + args.keys - args.rows) : args.keys;
}

AG_DEVICE Tile tile_of(const ForwardArgs& args, int i) {
    const int head = i / args.row_tiles, row_tile = i % args.row_tiles;
    const int keys = last_key(args, row_tile * kGroups * 64 + kGroups * 64 - 1);
    // A tile without keys has one step, which is masked as a whole.
    return {row_tile, head % args.heads, head / args.heads, ag_max(1, (keys + kKeys - 1) / kKeys)};
}

// ---- the lane that loads ------------------------------------------------------------------------

AG_DEVICE void load_keys(const ag_tensor_map& map, ag_u32 to, ag_u32 full, ag_u32 empty, const Place& at, int step, int head, int batch) {
    ag_barrier_wait(empty + 8 * at.stage, at.parity);
    ag_barrier_arrive_expect(full + 8 * at.stage, kStageBytes);
    for (int c = 0; c < kBlocks; ++c)
        ag_tensor_load(to + at.stage * kStageBytes + c * kKeys * 128, map, full + 8 * at.stage, c * 64, step * kKeys, head, batch);
}

// A warp group has its own slab of q, barriers, and record of the tile.
AG_DEVICE void load_queries(const ForwardArgs& args, ag_u32 shared, const Tile& tile, int parity) {
    for (int w = 0; w < kGroups; ++w) {
        const ag_u32 full = shared + kQFull + 8 * w, record = shared + kRecords + 16 * w;
        ag_barrier_wait(shared + kQEmpty + 8 * w, parity);
        ag_shared_store4(record, tile.row_tile);
        ag_shared_store4(record + 4, tile.head);
        ag_shared_store4(record + 8, tile.batch);
        ag_shared_store4(record + 12, tile.steps);
        ag_barrier_arrive_expect(full, kSlabBytes);
        for (int c = 0; c < kBlocks; ++c)
            ag_tensor_load(shared + kQ + w * kSlabBytes + c * 64 * 128, args.q, full, c * 64, (tile.row_tile * kGroups + w) * 64,
                           tile.head, tile.batch);
    }
}

AG_DEVICE void produce(const ForwardArgs& args, ag_u32 shared) {
    Place k = {0, 1}, v = {0, 1};
    int q_parity = 1, v_step = -1, v_head = 0, v_batch = 0;  // v comes one step behind k
    for (int i = ag_block() * args.tiles; i < (ag_block() + 1) * args.tiles; ++i) {
        const Tile tile = tile_of(args, i);
        const int head = tile.head / args.share;
        for (int step = tile.steps - 1; step >= 0; --step) {
            load_keys(args.k, shared + kK, shared + kKFull, shared + kKEmpty, k, step, head, tile.batch);
            k.move();
            if (v_step >= 0) {
                load_keys(args.v, shared + kV, shared + kVFull, shared + kVEmpty, v, v_step, v_head, v_batch);
                v.move();
            }
            v_step = step, v_head = head, v_batch = tile.batch;
            if (step == tile.steps - 1) load_queries(args, shared, tile, q_parity);
            if (step == 0) q_parity ^= 1;
        }
    }
    if (v_step >= 0) load_keys(args.v, shared + kV, shared + kVFull, shared + kVEmpty, v, v_step, v_head, v_batch);
    for (int w = 0; w < kGroups; ++w) {  // there is no other tile
        ag_barrier_wait(shared + kQEmpty + 8 * w, q_parity);
        ag_shared_store4(shared + kRecords + 16 * w, ~0u);
        for (int e = 1; e < 4; ++e) ag_shared_store4(shared + kRecords + 16 * w + 4 * e, 0);
        ag_barrier_arrive(shared + kQFull + 8 * w);
    }
}

// ---- the warp groups that compute ----------------------------------------------------------------

// What a lane has of two query rows, g and g + 8 of its warp's 16, with g = lane / 4.
struct State {
    float out[kHeadDim / 2], largest[2], sum[2];
    ag_u32 weights[kKeys / 16][4];
};

AG_DEVICE void release(ag_u32 barrier) {  // the warp has read what the barrier guards
    ag_sync_warp();
    if (ag_thread() % 32 == 0) ag_barrier_arrive(barrier);
}

AG_DEVICE void start_scores(float (&s)[kKeys / 2], ag_u32 q, ag_u32 k) {
    ag_pin(s);
    ag_wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
        ag_wgmma_shared_bf16<kHigh, kHigh, kMajorK>(s, q + d / 4 * 512 + d % 4 * 2, k + d / 4 * (kKeys * 8) + d % 4 * 2, d > 0);
    ag_wgmma_commit();
}

template <int kFrom, int kTo> AG_DEVICE void start_values(State& state, ag_u32 v) {
    ag_pin(state.out);
    ag_wgmma_fence();
#pragma unroll
    for (int part = kFrom; part < kTo; ++part)
        ag_wgmma_registers_bf16<kHigh, kMajorMN>(state.out, state.weights[part], v + part * 128, true);
    ag_wgmma_commit();
}

AG_DEVICE void mask_scores(float (&s)[kKeys / 2], int first_key, int limit, int limit8) {
    const int pair = ag_thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
        if (first_key + i / 4 * 8 + pair + i % 2 >= (i / 2 % 2 == 0 ? limit : limit8)) s[i] = -AG_INFINITY;
}

// The largest scores so far; returns by what the weights so far shrink.  From -1e30 on, which no masked score exceeds.
AG_DEVICE void find_largest(const float (&s)[kKeys / 2], float (&largest)[2], float (&shrink)[2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float x = largest[r];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) x = ag_max_number(x, s[i / 2 * 4 + r * 2 + i % 2]);
        x = ag_max_number(x, ag_shuffle_xor(x, 1));
        x = ag_max_number(x, ag_shuffle_xor(x, 2));
        shrink[r] = ag_exp2_approx((largest[r] - x) * scale_log2);
        largest[r] = x;
    }
}

AG_DEVICE void find_weights(float (&s)[kKeys / 2], const float (&largest)[2], float (&sum)[2], float scale_log2) {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
        const int r = i / 2 % 2;
        s[i] = ag_exp2_approx(ag_fma(s[i], scale_log2, -largest[r] * scale_log2));
        sum[r] += s[i];
    }
}

AG_DEVICE void pack_weights(const float (&s)[kKeys / 2], State& state) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) state.weights[i / 4][i % 4] = ag_pack<ag_bf16>(s[2 * i], s[2 * i + 1]);
}

// Normalize and store a tile whose last product is over; each warp by itself.
AG_DEVICE void store_tile(const ForwardArgs& args, ag_u32 shared, const Tile& tile, const State& state, const float (&largest)[2], const float (&sum)[2], int w) {
    const int lane = ag_thread() % 32, warp = ag_thread() / 32 % 4;
    const int row0 = (tile.row_tile * kGroups + w) * 64 + warp * 16;
    const ag_u32 staging = shared + kOut + (w * 4 + warp) * kOutBytes;
    float inverse[2];
    for (int r = 0; r < 2; ++r) {
        float x = sum[r] + ag_shuffle_xor(sum[r], 1);
        x += ag_shuffle_xor(x, 2);
        inverse[r] = x == 0.0f ? 0.0f : ag_reciprocal_approx(x);
        const int row = row0 + lane / 4 + 8 * r;
        if (lane % 4 == 0 && row < args.rows)
            ag_store(args.lse + (tile.batch * args.heads + tile.head) * args.rows + row,
                     x == 0.0f ? -AG_INFINITY : largest[r] * args.scale + ag_log(x));
    }
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
        if (lane == 0) ag_tensor_store_wait_read<0>();
        ag_sync_warp();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int row = lane % 16, chunk = k * 2 + lane / 16, first = (c * 4 + k) * 8;
            ag_u32 x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x[e] = ag_pack<ag_bf16>(state.out[first + 2 * e] * inverse[e % 2], state.out[first + 2 * e + 1] * inverse[e % 2]);
            ag_store_matrices(staging + row * 128 + (chunk ^ row % 8) * 16, x);
        }
        ag_async_fence();
        ag_sync_warp();
        if (lane == 0) {
            ag_tensor_store(args.out, staging, c * 64, row0, tile.head, tile.batch);
            ag_tensor_store_commit();
        }
    }
}

AG_DEVICE void consume(const ForwardArgs& args, ag_u32 shared) {
    const int w = ag_warp_group() - 1, lane = ag_thread() % 32, warp = ag_thread() / 32 % 4;
    const ag_u32 q = ag_matrix_low(shared + kQ + w * kSlabBytes, 16), k0 = ag_matrix_low(shared + kK, 16);
    const ag_u32 v0 = ag_matrix_low(shared + kV, kKeys * 128);
    Place k = {0, 0}, v = {0, 0};
    int q_parity = 0;
    bool has_values = false;  // a product with v is missing
    Tile tile = {0, 0, 0, 0};
    State state = {};
    if (w == kGroups - 1) ag_named_arrive(1, 256);  // the first turn
    for (;;) {
        const Tile before = tile;
        ag_u32 record[4];
        ag_barrier_wait(shared + kQFull + 8 * w, q_parity);
        ag_shared_load16(record, shared + kRecords + 16 * w);
        if ((int)record[0] < 0) break;
        tile = {(int)record[0], (int)record[1], (int)record[2], (int)record[3]};
        const int row0 = (tile.row_tile * kGroups + w) * 64, row = row0 + warp * 16 + lane / 4;
        const int full_steps = ag_max(last_key(args, row0), 0) / kKeys;  // behind them the mask is needed
#pragma unroll 1
        for (int step = tile.steps - 1; step >= 0; --step) {
            const bool is_first = step == tile.steps - 1;
            float s[kKeys / 2], shrink[2], sum[2], largest_before[2] = {state.largest[0], state.largest[1]};
            const float sum_before[2] = {state.sum[0], state.sum[1]};
            ag_barrier_wait(shared + kKFull + 8 * k.stage, k.parity);
            ag_named_sync(1 + w, 256);  // my turn
            start_scores(s, q, k0 + k.stage * (kStageBytes / 16));
            // In the first step of all there is nothing in `weights`: any values will do, those of k.
            if (has_values) ag_barrier_wait(shared + kVFull + 8 * v.stage, v.parity);
            const ag_u32 values = has_values ? v0 + v.stage * (kStageBytes / 16) : ag_matrix_low(shared + kK + k.stage * kStageBytes, kKeys * 128);
            start_values<0, kEarly>(state, values);
            ag_wgmma_wait<1>();
            ag_pin(s);
            const ag_u32 k_empty = shared + kKEmpty + 8 * k.stage;
            if (has_values) release(k_empty);
            if (step == 0) release(shared + kQEmpty + 8 * w);
            k.move();
            if (step >= full_steps) mask_scores(s, step * kKeys, last_key(args, row), last_key(args, row + 8));
            if (is_first) state.largest[0] = state.largest[1] = -1e30f;
            find_largest(s, state.largest, shrink, args.scale_log2);
            start_values<kEarly, kKeys / 16>(state, values);
            ag_named_arrive(w == kGroups - 1 ? 1 : 2 + w, 256);  // the next one's turn
            find_weights(s, state.largest, sum, args.scale_log2);
            ag_wgmma_wait<0>();
            ag_pin(state.out);
            ag_pin(state.weights);
            if (has_values) {
                release(shared + kVEmpty + 8 * v.stage);
                v.move();
            } else {
                release(k_empty);
            }
            pack_weights(s, state);
            if (is_first) {
                if (has_values) store_tile(args, shared, before, state, largest_before, sum_before, w);
                for (int i = 0; i < kHeadDim / 2; ++i) state.out[i] = 0.0f;
                for (int r = 0; r < 2; ++r) state.sum[r] = sum[r];
            } else {
                for (int i = 0; i < kHeadDim / 2; ++i) state.out[i] *= shrink[i / 2 % 2];
                for (int r = 0; r < 2; ++r) state.sum[r] = ag_fma(state.sum[r], shrink[r], sum[r]);
            }
            has_values = true;
        }
        q_parity ^= 1;
    }
    if (has_values) {
        ag_barrier_wait(shared + kVFull + 8 * v.stage, v.parity);
        start_values<0, kKeys / 16>(state, v0 + v.stage * (kStageBytes / 16));
        ag_wgmma_wait<0>();
        ag_pin(state.out);
        store_tile(args, shared, tile, state, state.largest, state.sum, w);
    }
    if (lane == 0) ag_tensor_store_wait<0>();
    if (w == 0) ag_named_sync(1, 256);  // the last turn, which nobody takes
}

AG_KERNEL(kThreads, wgmma_forward, ForwardArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    if (ag_thread() == 0) {
        for (int w = 0; w < kGroups; ++w) {
            ag_barrier_init(shared + kQFull + 8 * w, 1);
            ag_barrier_init(shared + kQEmpty + 8 * w, 4);
        }
        for (int i = 0; i < kStages; ++i) {  // a stage is given back by every warp
            ag_barrier_init(shared + kKFull + 8 * i, 1);
            ag_barrier_init(shared + kKEmpty + 8 * i, 4 * kGroups);
            ag_barrier_init(shared + kVFull + 8 * i, 1);
            ag_barrier_init(shared + kVEmpty + 8 * i, 4 * kGroups);
        }
        ag_barrier_init_fence();
    }
    ag_sync();
    if (ag_warp_group() == 0) {
        ag_registers_decrease<40>();
        if (ag_thread() == 0) produce(args, shared);
    } else {
        ag_registers_increase<232>();
        consume(args, shared);
    }
}
