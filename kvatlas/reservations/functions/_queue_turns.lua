-- The turns of the requests that are waiting (`_queue.lua`): the order in which they may be tried.

local MOST_AHEAD, MOST_REMOVED = 64, 16 -- lines that are counted for a place, and ordered requests that no longer wait

-- Begins a look at the queue.
local function look_at_queue(keys, now)
  return { keys = keys, now = now, alive = {}, workers = {}, packed_workers = {}, left = MOST_REMOVED }
end

local function is_alive(look, router)
  local alive = look.alive[router]
  if alive == nil then
    local ends = redis.call('ZSCORE', look.keys[QUEUE_DEADLINES], 'q' .. router)
    alive = ends and tonumber(ends) > look.now or false
    look.alive[router] = alive
  end
  return alive
end

local function still_waits(look, entry)
  return (tonumber(string.sub(entry[E_PLACE], 2, 17)) or 0) > look.now and is_alive(look, entry[E_ROUTER])
end

-- Returns the next request of a line that still waits, after a member of `queue_lines`; it drops some that do not.
local function next_waiting(look, line, after)
  local keys, low = look.keys, after and '(' .. after or '[p' .. line
  while look.left > 0 do
    local member = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], low, '(p' .. line .. '2', 'LIMIT', 0, 1)[1]
    if not member then
      return nil
    end
    local id = string.sub(member, -ID_BYTES)
    local entry = get_entry(keys, id)
    if not entry then
      redis.call('ZREM', keys[QUEUE_LINES], member)
    elseif still_waits(look, entry) then
      return { member = member, line = line, id = id, entry = entry }
    else
      leave_one(keys, id, entry, look.now)
    end
    look.left = look.left - 1
  end
end

-- Gives a request its places in the order of its lane, and of all lanes. Strings are compared according to the server's locale,
-- so ids are compared as digits.
local function put_in_order(one, counter)
  local rank, tenant = string.sub(one.line, ACCOUNT_AT, ACCOUNT_AT + 7), string.sub(one.line, ACCOUNT_AT + 8)
  local place = one.entry[E_PLACE] .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', one.id))
  one.counter, one.in_lane, one.key = counter, rank .. padded(counter) .. tenant .. place, rank .. padded(counter) .. place
  return one
end

-- Returns the first `most` requests of a lane in their order.
local function first_in_lane(look, lane, most)
  local keys, heads, first = look.keys, {}, {}
  local members = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[t' .. lane, '(t' .. lane .. 'g', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local rank, counter, tenant = string.sub(member, 18, 25), tonumber(string.sub(member, 26, 41)), string.sub(member, 42)
    local line = lane .. rank .. tenant
    local one = next_waiting(look, line)
    if one then
      heads[#heads + 1] = put_in_order(one, counter)
    elseif redis.call('HEXISTS', keys[QUEUE_NUMBERS], 'n' .. line) == 0 then
      redis.call('ZREM', keys[QUEUE_LINES], member, own_member(lane, rank .. tenant))
    end
  end
  while #first < most and heads[1] do
    local least = 1
    for i = 2, #heads do
      if heads[i].in_lane < heads[least].in_lane then
        least = i
      end
    end
    local one = table.remove(heads, least)
    if first[1] and one.key < first[#first].key then
      one.key = first[#first].key
    end
    first[#first + 1] = one
    local after = #first < most and next_waiting(look, one.line, one.member)
    if after then
      local counter = one.counter + math.floor(one.entry[E_UNITS] * 1000 / one.entry[E_WEIGHT])
      heads[#heads + 1] = put_in_order(after, math.min(counter, MOST_COUNTER))
    end
  end
  return first
end

-- Returns the workers that a lane is for; false for all workers.
local function workers_of_lane(look, lane)
  if look.workers[lane] == nil then
    local packed = look.packed_workers[lane]
    look.workers[lane] = packed and packed ~= '' and cmsgpack.unpack(packed) or false
  end
  return look.workers[lane]
end

-- Returns the first request of each lane; nil for one that has to be looked at by itself.
local function heads_in_lanes(look, lanes)
  local keys, lines, ids, heads = look.keys, {}, {}, {}
  for i, lane in ipairs(lanes) do
    local turn = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[t' .. lane, '(t' .. lane .. 'g', 'LIMIT', 0, 1)[1] or ''
    local line = lane .. string.sub(turn, 18, 25) .. string.sub(turn, 42)
    local member = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[p' .. line, '(p' .. line .. '2', 'LIMIT', 0, 1)[1] or ''
    lines[i], ids[i] = { line, tonumber(string.sub(turn, 26, 41)) }, string.sub(member, -ID_BYTES)
  end
  for i, packed in ipairs(redis.call('HMGET', keys[QUEUED_REQUESTS], unpack(ids))) do
    local entry = packed and unpack_record(packed, ENTRY_FORM, 'waiting request')
    if entry and lines[i][2] and still_waits(look, entry) then
      heads[i] = put_in_order({ line = lines[i][1], id = ids[i], entry = entry }, lines[i][2])
    end
  end
  return heads
end

-- Returns the first requests of all lanes in their order, each with its lane. `wide`: as many as each lane's window may ever
-- have, with `soon` if they are beyond the present one.
local function first_of_lanes(look, wide)
  local keys, items, lanes = look.keys, {}, lanes_of(look.keys)
  if not lanes[1] then
    return items
  end
  local share, fields = math.max(1, math.floor(MOST_WINDOW / #lanes)), {}
  for i, lane in ipairs(lanes) do
    fields[i] = 'l' .. lane
  end
  for i, packed in ipairs(redis.call('HMGET', keys[QUEUE_NUMBERS], unpack(fields))) do
    look.packed_workers[lanes[i]] = packed
  end
  local heads = share == 1 and heads_in_lanes(look, lanes) or {}
  for i, lane in ipairs(lanes) do
    local width, window = share, MOST_WINDOW
    if lane == STRAYS then
      width = MOST_WINDOW
    else
      window = share > 1 and math.max(1, queue_number(keys, 'k' .. lane)) or 1
    end
    local most = wide and width or math.min(window, width)
    for number, one in ipairs(most == 1 and heads[i] and { heads[i] } or first_in_lane(look, lane, most)) do
      one.lane, one.number, one.soon = lane, number, number > window
      items[#items + 1] = one
    end
  end
  table.sort(items, function(one, other)
    return one.key < other.key or (one.key == other.key and one.number < other.number)
  end)
  return items
end

-- Returns whether a request of a lane may go to a worker that the lanes ahead of it leave free. `own`: its lane's first request
-- is among those ahead.
local function has_free_worker(workers, taken, own)
  for _, worker in ipairs(workers) do
    if (taken[worker] or 0) == (own and 1 or 0) then
      return true
    end
  end
  return false
end

-- Returns
-- - the requests among these that may be tried now: { { id, router, how many lanes come before, number of its own among these
--   (0: none) }... }; up to one request, if given
-- - the lanes whose first requests come before, in their order
local function turns_of(look, items, until_id)
  local taken, passed, order, turns, holder = {}, {}, {}, {}, nil
  for _, one in ipairs(items) do
    local lane, workers = one.lane, workers_of_lane(look, one.lane)
    local own, free = passed[lane], not holder or holder == one.lane
    if free and not one.soon and (not workers or has_free_worker(workers, taken, own)) then
      turns[#turns + 1] = { one.id, one.entry[E_ROUTER], #order, own or 0 }
    end
    if one.id == until_id then
      break
    end
    if not own and lane ~= STRAYS then
      order[#order + 1], passed[lane] = lane, #order + 1
      for _, worker in ipairs(workers or {}) do
        taken[worker] = (taken[worker] or 0) + 1
      end
      holder = holder or (not workers and lane) or nil
    end
  end
  return turns, order
end

-- Returns the set of workers that a request must leave to others if it is tried now; nil if it is not the request's turn.
local function blocked_for(keys, id, now)
  local look = look_at_queue(keys, now)
  local turns, order = turns_of(look, first_of_lanes(look, false), id)
  local last = turns[#turns]
  if not last or last[1] ~= id then
    return nil
  end
  local blocked = {}
  for i = 1, last[3] do
    for _, worker in ipairs(i ~= last[4] and workers_of_lane(look, order[i]) or {}) do
      blocked[worker] = true
    end
  end
  return blocked
end

-- Returns roughly how many requests go before one that is waiting.
local function count_ahead(keys, id)
  local entry = get_entry(keys, id)
  if not entry then
    return 0
  end
  local line, ahead = entry[E_LINE], 0
  local lane, rank, tenant = string.sub(line, 1, 16), string.sub(line, 17, 24), string.sub(line, 25)
  local start = 'p' .. line
  local before = redis.call('ZLEXCOUNT', keys[QUEUE_LINES], '[' .. start, '(' .. start .. entry[E_PLACE] .. id)
  local own = padded(counter_of(keys, rank .. tenant)) .. tenant
  local members = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[t' .. lane, '(t' .. lane .. 'g', 'LIMIT', 0, MOST_AHEAD)
  local fields = { 'none' }
  for i, member in ipairs(members) do
    fields[i] = 'n' .. lane .. string.sub(member, 18, 25) .. string.sub(member, 42)
  end
  local numbers = redis.call('HMGET', keys[QUEUE_NUMBERS], unpack(fields))
  for i, member in ipairs(members) do
    local other_rank, other = string.sub(member, 18, 25), string.sub(member, 26)
    if other_rank > rank then
      break
    elseif other == own and other_rank == rank then
      ahead = ahead + before
    else
      local waiting = tonumber(numbers[i] or 0) or 0
      ahead = ahead + (other_rank < rank and waiting or math.min(waiting, before + (other < own and 1 or 0)))
    end
  end
  return ahead
end

-- Records that a request found no room: only the first request of its lane is tried next.
local function narrow_window(keys, id)
  local entry = get_entry(keys, id)
  local lane = entry and string.sub(entry[E_LINE], 1, LANE_END)
  if lane and lane ~= STRAYS then
    redis.call('HSET', keys[QUEUE_NUMBERS], 'k' .. lane, 1)
  end
end
