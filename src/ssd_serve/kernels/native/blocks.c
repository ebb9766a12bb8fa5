/* Best-first trees from rows of candidates, as drafter/blocks.py defines them. */
#include <stdint.h>
#include <stdlib.h>

typedef struct {
  double cost;
  int32_t order, node, rank;
} waiting;

static int before(const waiting *a, const waiting *b) {
  return a->cost < b->cost || (a->cost == b->cost && a->order < b->order);
}

static void push(waiting *heap, long *count, waiting new) {
  long at = (*count)++;
  for (long above; at && before(&new, &heap[above = (at - 1) / 2]); at = above) heap[at] = heap[above];
  heap[at] = new;
}

static waiting pop(waiting *heap, long *count) {
  waiting first = heap[0], last = heap[--*count];
  long at = 0;
  for (long below; (below = 2 * at + 1) < *count; at = below) {
    if (below + 1 < *count && before(&heap[below + 1], &heap[below])) below++;
    if (!before(&heap[below], &last)) break;
    heap[at] = heap[below];
  }
  heap[at] = last;
  return first;
}

/* Writes parent, rank and row of up to `nodes` nodes, the first of which is given; returns their number, 0 without
 * memory. `values` and `following` are [rows, candidates]. */
long ssd_grow_tree(const float *values, const int32_t *following, long candidates, long nodes, double least,
                   int32_t *parents, int32_t *ranks, int32_t *rows) {
  waiting *heap = malloc(sizeof(waiting) * (size_t)(2 * nodes + 2));
  double *reach = malloc(sizeof(double) * (size_t)nodes);
  long made = 0, count = 0;
  int32_t order = 0;
  if (heap && reach) {
    parents[0] = -1, ranks[0] = 0, rows[0] = 0, reach[0] = 0.0, made = 1;
    push(heap, &count, (waiting){-(double)values[0], order++, 0, 0});
  }
  while (made && made < nodes && count) {
    waiting next = pop(heap, &count);
    if (-next.cost < least) break;
    long at = rows[next.node] * candidates + next.rank;
    if (next.rank + 1 < candidates)
      push(heap, &count, (waiting){-(reach[next.node] + values[at + 1]), order++, next.node, next.rank + 1});
    if (following[at] < 0) continue;
    parents[made] = next.node, ranks[made] = next.rank, rows[made] = following[at], reach[made] = -next.cost;
    push(heap, &count, (waiting){next.cost - values[following[at] * candidates], order++, (int32_t)made, 0});
    made++;
  }
  free(heap), free(reach);
  return made;
}
