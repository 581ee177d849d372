// Made from src/constants.rs; a test compares the two.
#pragma once

enum RowMode { ALL_ROWS = 0, LISTED_ROWS = 1, CHOSEN_ROWS = 2, ROUTED_ROWS = 3 };
enum GateMode { SOFTMAX_TOPK = 0, SOFTMAX_TOPK_RENORM = 1, TOPK_SOFTMAX = 2 };
enum Activation { NO_ACTIVATION = -1, RELU = 0, GELU = 1, SILU = 2, GELU_TANH = 3 };

const int GROUP_TOKENS = 4;
const int MAX_SPLITS = 32;
const int LIST_THREADS = 1024;
const int SUM_THREADS = 256;
