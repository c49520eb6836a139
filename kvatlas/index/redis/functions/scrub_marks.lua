-- Comparing marks with their digests: see kvatlas/index/redis/recount.py.

-- Returns a worker's marks at this moment: {incarnation, seq, active holder, digest of its marks; false: none} (MarksState in
-- kvatlas/index/redis/records.py), and the active holder; false without one.
local function marks_state_of(workers, marked, worker)
  local packed = redis.call('HGET', workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local marks = redis.call('HGET', marked, record[ACTIVE])
  return { record[INCARNATION], record[SEQ], record[ACTIVE], marks and unpack_marks(marks).words }, record[ACTIVE]
end

local function entry_size(field)
  return #field == 8 and MARK or HEAD
end

-- scrub_marks: what some workers' active holders have in a part of one scope's marks, and the workers' states at that moment.
--
-- KEYS 1 marks of the scope
--      2 workers
--      3 holders
--      4 marked
-- ARGV 1 cursor
--      2 count
--      3... workers
-- returns msgpack {next cursor, {state or false...}, {field, the worker's index (from 0), bits ('' of a mark)...}, {field...}}
--   fields at the end: those with an entry of an unknown number
redis.register_function({
  function_name = 'kvatlas_scrub_marks',
  callback = function(keys, args)
    local key, workers, holders, marked = unpack(keys)
    local states, mine, known = {}, {}, {}
    for i = 3, #args do
      local state, holder = marks_state_of(workers, marked, args[i])
      states[i - 2] = state
      if state then
        mine[holder] = i - 3
      end
    end
    local next_cursor, flat = unpack(redis.call('HSCAN', key, args[1], 'COUNT', args[2]))
    local found, strays = {}, {}
    for i = 1, #flat, 2 do
      local field, value = flat[i], flat[i + 1]
      local size, stray = entry_size(field), #value == 0
      for at = 1, #value, size do
        local number = string.sub(value, at, at + 2)
        if mine[number] then
          found[#found + 1] = field
          found[#found + 1] = mine[number]
          found[#found + 1] = string.sub(value, at + 3, at + size - 1)
        else
          if known[number] == nil then
            known[number] = redis.call('HEXISTS', holders, number) == 1
          end
          stray = stray or not known[number]
        end
      end
      if stray then
        strays[#strays + 1] = field
      end
    end
    return cmsgpack.pack({ next_cursor, states, found, strays })
  end,
  flags = { 'no-writes' },
})

-- look_marks: what a worker's active holder has in single fields of marks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 marked
--      3... marks of each scope
-- ARGV 1 worker
--      2... msgpack {field...} of each scope
-- returns msgpack {state or false, {{false: nothing, or bits ('' of a mark)...}...}}
redis.register_function({
  function_name = 'kvatlas_look_marks',
  callback = function(keys, args)
    local state, holder = marks_state_of(keys[1], keys[2], args[1])
    local entries = {}
    for i = 2, #args do
      local fields, seen = cmsgpack.unpack(args[i]), {}
      local values = read_fields(keys[i + 1], fields)
      for j = 1, #fields do
        local value, size = values[fields[j]], entry_size(fields[j])
        local at = state and value and find_sized(value, holder, size)
        seen[j] = at and string.sub(value, at + 3, at + size - 1) or false
      end
      entries[i - 1] = seen
    end
    return cmsgpack.pack({ state, entries })
  end,
  flags = { 'no-writes' },
})

-- stray_marks: takes entries of unknown numbers out of marks: such a number may be given to a worker one day.
--
-- KEYS 1 marks of the scope
--      2 holders
-- ARGV field...
-- returns how many entries it took out
redis.register_function({
  function_name = 'kvatlas_stray_marks',
  callback = function(keys, args)
    local key, holders, taken = keys[1], keys[2], 0
    for i = 1, #args do
      local field = args[i]
      local value, rest, size = redis.call('HGET', key, field) or '', {}, entry_size(field)
      for at = 1, #value, size do
        if redis.call('HEXISTS', holders, string.sub(value, at, at + 2)) == 1 then
          rest[#rest + 1] = string.sub(value, at, at + size - 1)
        else
          taken = taken + 1
        end
      end
      if #rest == 0 then
        redis.call('HDEL', key, field)
      elseif #rest * size ~= #value then
        redis.call('HSET', key, field, table.concat(rest))
      end
    end
    return taken
  end,
  flags = { 'allow-oom' },
})
