/* Takes back what a set of instructions defined for `packed_panels.inc.h`. */
#undef NAME
#undef INTEGERS
#undef FLOATS
#undef VECTORS
#undef MOST_ROWS
#undef SAME
#undef EACH
#undef EACH_FLOAT
#undef ADD_FLOATS
#undef TIMES
#undef AS_FLOATS
#undef LOAD_INTEGERS
#undef LOAD_FLOATS
#undef STORE_FLOATS
#undef SIGNED
#undef DOT
#undef KERNEL
