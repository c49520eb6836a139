-- Comparing marks with their digests: see kvatlas/index/redis/recount.py.

-- Returns a worker's marks at this moment: {incarnation, seq, active holder, digest of its marks; false: none, steps of the next
-- message that are applied} (MarksState in kvatlas/index/redis/records.py), and the active holder; false without one.
-- k: {workers, marked, steps = keys}
local function marks_state_of(k, worker)
  local packed = redis.call('HGET', k.workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local marks = redis.call('HGET', k.marked, record[ACTIVE])
  local steps = steps_applied(redis.call('HGET', k.steps, worker), record[INCARNATION], record[SEQ] + 1)
  return { record[INCARNATION], record[SEQ], record[ACTIVE], marks and unpack_marks(marks).words, steps }, record[ACTIVE]
end

local function entry_size(field)
  return #field == 8 and MARK or HEAD
end

local MARKS_FIELD, MARKS_ENTRY = 1, 0.5 -- what a field costs, and each of its entries

-- scrub_marks: what some workers' active holders have in a part of one scope's marks, and the workers' states at that moment.
--
-- KEYS 1 marks of the scope
--      2 workers
--      3 holders
--      4 marked
--      5 steps
-- ARGV 1 server on which the scrub began
--      2 cursor
--      3 budget: the cost of what is looked at
--      4... workers
-- returns msgpack {server, next cursor, cost, {state or false...}, {field, the worker's index (from 0), bits ('' of a mark)...},
--   {field...}}; on another server, where the cursor means nothing, {server} alone
--   fields at the end: those with an entry of an unknown number
register_read_only('kvatlas_scrub_marks', function(keys, args)
  local key, holders, k = keys[1], keys[3], { workers = keys[2], marked = keys[4], steps = keys[5] }
  local began_on, cursor, budget, server = args[1], args[2], tonumber(args[3]), server_id()
  if began_on ~= server then
    return cmsgpack.pack({ server })
  end
  local states, mine, known = {}, {}, {}
  for i = 4, #args do
    local state, holder = marks_state_of(k, args[i])
    states[i - 3] = state
    if state then
      mine[holder] = i - 4
    end
  end
  local found, strays, seen, cost = {}, {}, 0, STATE_COST * (#args - 3)
  repeat
    local flat
    cursor, flat = unpack(redis.call('HSCAN', key, cursor, 'COUNT', fields_to_scan(seen, cost, budget)))
    cost = cost + SCAN_COST
    seen = seen + #flat / 2
    for i = 1, #flat, 2 do
      local field, value = flat[i], flat[i + 1]
      local size, stray = entry_size(field), #value == 0
      cost = cost + MARKS_FIELD + MARKS_ENTRY * #value / size
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
  until cursor == '0' or cost >= budget
  return cmsgpack.pack({ server, cursor, math.ceil(cost), states, found, strays })
end)

-- look_marks: what a worker's active holder has in single fields of marks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 marked
--      3 steps
--      4... marks of each scope
-- ARGV 1 worker
--      2... msgpack {field...} of each scope
-- returns msgpack {server, state or false, {{false: nothing, or bits ('' of a mark)...}...}}
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
end)

-- stray_marks: takes entries of unknown numbers out of marks: such a number may be given to a worker one day.
--
-- KEYS 1 marks of the scope
--      2 holders
-- ARGV field...
-- returns how many entries it took out
register_always('kvatlas_stray_marks', function(keys, args)
  local key, holders, taken, known = keys[1], keys[2], 0, {}
  for i = 1, #args do
    local field = args[i]
    local value, rest, size = redis.call('HGET', key, field) or '', {}, entry_size(field)
    for at = 1, #value, size do
      local number = string.sub(value, at, at + 2)
      if known[number] == nil then
        known[number] = redis.call('HEXISTS', holders, number) == 1
      end
      if known[number] then
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
end)
