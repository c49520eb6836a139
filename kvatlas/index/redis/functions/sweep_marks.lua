-- sweep_marks: removes retired holders from the marks of some scopes, as far as the budget goes.
--
-- KEYS 1 retired
--      2 marked
--      3... marks of each scope
-- ARGV and the answer are the same as those of sweep

-- budget costs: of a field, of each entry that stays, of each entry that is removed, and of each holder whose digest changes
local FIELD_COST, KEPT_COST, TAKEN_COST, HOLDER_COST = 1, 0.2, 1, 8

-- Removes holders from one field of marks. swept: {holder -> whether it is retired}. Returns the cost.
local function take_out_of_marks(key, field, value, swept, scope, words_of)
  local size, rest, cost = #field == 8 and MARK or HEAD, {}, FIELD_COST
  for at = 1, #value, size do
    local holder = string.sub(value, at, at + 2)
    if swept[holder] then
      local words = words_of(holder)
      if words and size == MARK then
        count_blocks(words, 0, field, scope, -1)
      elseif words then
        count_head(words, field, string.sub(value, at + 3, at + 10), scope, -1)
      end
      cost = cost + TAKEN_COST
    else
      rest[#rest + 1] = string.sub(value, at, at + size - 1)
      cost = cost + KEPT_COST
    end
  end
  rest = table.concat(rest)
  if rest == '' then
    redis.call('HDEL', key, field)
  elseif rest ~= value then
    redis.call('HSET', key, field, rest)
  end
  return cost
end

register_always('kvatlas_sweep_marks', function(keys, args)
  local retired, marked, server = keys[1], keys[2], server_id()
  local began_on, budget, cursor, scope_ids = args[1], integer(args[2], 0, 10000), args[3], split(args[4])
  if began_on ~= '' and began_on ~= server then
    return { server }
  end
  local swept, changed = retired_among(retired, args[5]), {}
  local cost, done, seen = 0, 0, 0
  local function words_of(holder)
    if changed[holder] == nil then
      cost = cost + HOLDER_COST
      local packed = redis.call('HGET', marked, holder)
      changed[holder] = packed and unpack_marks(packed) or false
    end
    return changed[holder] and changed[holder].words
  end
  while done < #scope_ids and cost < budget do
    local key, scope = keys[3 + done], {}
    scope.mix_low, scope.mix_high = mix_of(scope_ids[done + 1])
    cost = cost + SCOPE_COST
    repeat
      local flat
      cursor, flat = unpack(redis.call('HSCAN', key, cursor, 'COUNT', fields_to_scan(seen, cost, budget)))
      cost = cost + SCAN_COST
      for i = 1, #flat, 2 do
        local taken = take_out_of_marks(key, flat[i], flat[i + 1], swept, scope, words_of)
        cost = cost + taken -- plus what words_of has added
      end
      seen = seen + #flat / 2
    until cursor == '0' or cost >= budget
    if cursor == '0' then
      done = done + 1
    end
  end
  for holder, marks in pairs(changed) do
    if marks then
      redis.call('HSET', marked, holder, pack_marks(marks))
    end
  end
  return { server, done, cursor, math.ceil(cost) }
end)
