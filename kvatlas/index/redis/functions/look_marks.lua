-- look_marks: the entries of a worker's active holder in the given fields of marks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 marked
--      3 steps
--      4... marks of each scope
-- ARGV 1 worker
--      2... msgpack {field...} of each scope
-- returns msgpack {server, state or false, {{bits of each field ('' of a mark; false: nothing)...} of each scope...}}
register_read_only('kvatlas_look_marks', function(keys, args)
  local state, holder = marks_state_of({ workers = keys[1], marked = keys[2], steps = keys[3] }, args[1])
  local entries = {}
  for i = 2, #args do
    local fields, seen = cmsgpack.unpack(args[i]), {}
    local values = read_fields(keys[i + 2], fields)
    for j = 1, #fields do
      local value, size = values[fields[j]], entry_size(fields[j])
      local at = state and value and find_sized(value, holder, size)
      seen[j] = at and string.sub(value, at + 3, at + size - 1) or false
    end
    entries[i - 1] = seen
  end
  return cmsgpack.pack({ server_id(), state, entries })
end, MOST_LOOKED, MOST_LOOKED_BYTES)
