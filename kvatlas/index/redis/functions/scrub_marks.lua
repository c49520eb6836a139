local MARKS_FIELD, MARKS_ENTRY = 1, 0.5 -- budget cost of a field, and of each of its entries

-- scrub_marks: the entries of some workers' active holders in a part of one scope's marks, and the workers' states at that
-- moment.
--
-- KEYS 1 marks of the scope
--      2 workers
--      3 holders
--      4 active
--      5 digests
--      6 steps
--      7 marked
-- ARGV 1 server on which the scrub began
--      2 cursor
--      3 budget: the cost of what is looked at
--      4... workers
-- returns msgpack {server, next cursor, cost, {state or false...}, {field, the worker's index (from 0), bits ('' of
--   a mark)...}, {field with an entry of an unknown number...}}; {server} alone if this is another server,
--   where the cursor means nothing
register_read_only('kvatlas_scrub_marks', function(keys, args)
  local key, holders = keys[1], keys[3]
  local began_on, cursor, budget, server = args[1], args[2], integer(args[3], 0, MOST_SCRUB), server_id()
  if began_on ~= server then
    return cmsgpack.pack({ server })
  end
  local states, mine, known = {}, {}, {}
  for i = 4, #args do
    local state, holder = state_of(keys, 2, args[i])
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
end, 3 + MOST_SCRUBBED)
