-- apply: applies messages of one shard's partitions to workers' records, holders, blocks and digests in one call. The data of
-- all workers is read in one command and written in another.
--
-- KEYS 1 workers
--      2 holders
--      3 active
--      4 retired
--      5 free
--      6 digests
--      7 touched
--      8 partitions
--      9 meta
--      10 steps
--      11 held
--      12 moments
--      13... blocks of each scope, in the order of the argument; with the side index, children and parents of each; marked;
--         marks of each scope that has any in this call
-- ARGV 1 msgpack {reuse ms, highest cost of the blocks, {scope...}, {position...}, {worker...}, {number of a scope with
--        marks...}}, packed by kvatlas/index/redis/apply_call.py
--        scope: {scope id, 1 if two events may have a block in common, otherwise 0, number of blocks, some of their hashes,
--        packed}
--        position: {partition, stream creation us, stream seq before the batch, stream seq after it}
--        worker: {worker id, partition, {incarnation -> {scope id -> its sizes, see _fence.lua}}, {group...}}
--        group: {incarnation, first seq, last seq, {event...}}; if a message may come in parts, then also first step, 1 if the
--          message ends with these events, {step after each event}; see _fence.lua. No event repeats a block.
-- returns msgpack {{weight of each scope...}, counts in the order of COUNTS, {moved partition...}, {worker id, record...}};
--   {{weight of each scope...}} alone: nothing was applied, since the call is too large by these weights (0: not looked at)
register('kvatlas_apply', function(keys, args)
  return apply(keys, args, false)
end, 1, MOST_CALL)
