-- The requests that wait for a worker with room, and the order in which they may be tried. The Python twin, which explains the
-- order, is `kvatlas/reservations/pool_queue.py`.
--
-- A line is <lane> <rank, 8 hex digits> <tenant>; lanes and tenants are 16 hex digits. An account is its end, <rank> <tenant>.
-- A place is <0 if its program runs, else 1> <deadline in us, 16 digits> <us at which it arrived, 16 digits>.
--
-- waiting   id (16 bytes) -> cmsgpack { router, line, place, prompt tokens, expected units, weight in thousandths, tenant }
-- lines     by bytes: 'p' <line> <place> <id> what waits in a line; 'r' <router> \0 <id> what waits at a router; 't' <lane>
--           <rank> <counter of the account, 16 digits> <tenant> the lines in their order
-- queue     'tokens' all prompts'; 'lines' how many there are; 'lanes' their names, one after another; 'weights' the sum of all
--           tenants'; 'n' <line>, 'a' <account>, 'c' <lane>, 'o' <router> how many wait there; 't' <tenant> -> "requests tokens
--           weight"; 'l' <lane> -> cmsgpack list of its workers, '' for all; 'k' <lane> -> its window; without anything that
--           waits only 'idle' -> us since when
-- counters  'c' <account> -> service of what was booked while requests waited; 'v' <rank> -> the highest before a booking
-- deadlines 'e' <id> a request may wait no longer; 'q' <router> it no longer asks; 'a' <program> it no longer runs
--
-- row, cmsgpack: { id, tenant, weight in thousandths, rank, program (16 hex digits; '': none), prompt tokens, output tokens, us
--   since it arrived, us that it may wait, lane, { workers... } (0: all), most requests, most tokens }

local LEASE_US, PROGRAM_US, FORGET_US = 1000000, 300000000, 60000000
local MOST_WINDOW, MOST_LANES, MOST_LINES, MOST_AHEAD = 16, 8, 512, 64
local UNCACHED_UNITS, CACHED_UNITS, OUTPUT_UNITS = 10, 1, 20
local MOST_LANE_WORKERS, MOST_RANK, MOST_REMOVED = 64, 4294967294, 16
local ALL_WORKERS, SHARED = '0000000000000000', '0000000000000000'
local E_ROUTER, E_LINE, E_PLACE, E_TOKENS, E_UNITS, E_WEIGHT, E_TENANT = 1, 2, 3, 4, 5, 6, 7
local ENTRY_FORM = { 'string', 'string', 'string', 'number', 'number', 'number', 'string' }
local LANE_END, ACCOUNT_AT = 16, 17 -- within a line

local function service_units(uncached, cached, output)
  return UNCACHED_UNITS * uncached + CACHED_UNITS * cached + OUTPUT_UNITS * output
end

local function padded(number)
  return string.format('%016d', number)
end

-- Unpacks what a router says of a request. Raises an error for anything that is out of bounds.
local function check_row(row)
  local function name(value, may_be_empty)
    if type(value) ~= 'string' or not (string.find(value, '^%x+$') and #value == 16 or may_be_empty and value == '') then
      error({ err = 'ERR waiting request: expected a name of 16 hex digits' })
    end
    return value
  end
  if type(row) ~= 'table' or type(row[1]) ~= 'string' or #row[1] ~= ID_BYTES then
    error({ err = 'ERR waiting request: expected an id of ' .. ID_BYTES .. ' bytes' })
  end
  local workers = type(row[11]) == 'table' and row[11] or nil
  if workers and #workers > MOST_LANE_WORKERS then
    error({ err = 'ERR waiting request: ' .. MOST_LANE_WORKERS .. ' workers at most' })
  end
  return {
    id = row[1], tenant = name(row[2]), weight = integer(row[3], 1, 1000000), rank = integer(row[4], 0, MOST_RANK),
    program = name(row[5], true), tokens = integer(row[6], 0, 2 ^ 40), output = integer(row[7], 0, 2 ^ 40),
    age = integer(row[8], 0), left = integer(row[9], 0, 2 ^ 40), lane = name(row[10]), workers = workers,
    most_requests = integer(row[12], 0), most_tokens = integer(row[13], 0),
  }
end

local function account_of(row, tenant)
  return string.format('%08x', row.rank) .. tenant
end

local function get_entry(keys, id)
  local packed = redis.call('HGET', keys[WAITING_REQUESTS], id)
  return packed and unpack_record(packed, ENTRY_FORM, 'waiting request')
end

-- Adds to a number of the queue, which is removed at 0. Returns the sum.
local function add_to_queue(keys, field, number)
  local sum = redis.call('HINCRBY', keys[QUEUE], field, string.format('%d', number))
  if sum <= 0 then
    redis.call('HDEL', keys[QUEUE], field)
  end
  return sum
end

-- Returns a number of the queue.
local function queue_number(keys, field)
  return tonumber(redis.call('HGET', keys[QUEUE], field) or 0) or 0
end

local function queue_sizes(keys)
  return redis.call('HLEN', keys[WAITING_REQUESTS]), queue_number(keys, 'tokens')
end

local function lanes_of(keys)
  local names, lanes = redis.call('HGET', keys[QUEUE], 'lanes') or '', {}
  for at = 1, #names, LANE_END do
    lanes[#lanes + 1] = string.sub(names, at, at + LANE_END - 1)
  end
  return lanes
end

local function counter_of(keys, account)
  return tonumber(redis.call('HGET', keys[COUNTERS], 'c' .. account) or 0) or 0
end

-- Returns the member of `lines` that puts a line in order.
local function turn_member(lane, account, counter)
  return 't' .. lane .. string.sub(account, 1, 8) .. padded(counter) .. string.sub(account, 9)
end

-- Changes a tenant's requests and tokens; drops one without requests. `weight`: its present one.
local function count_tenant(keys, tenant, requests, tokens, weight)
  local known = redis.call('HGET', keys[QUEUE], 't' .. tenant)
  local had_requests, had_tokens, had_weight = string.match(known or '0 0 0', '^(%d+) (%d+) (%d+)$')
  if not had_requests then
    damaged('tenant of a queue')
  end
  requests, weight = had_requests + requests, weight or tonumber(had_weight)
  if requests > 0 then
    redis.call('HSET', keys[QUEUE], 't' .. tenant, string.format('%d %d %d', requests, had_tokens + tokens, weight))
  else
    redis.call('HDEL', keys[QUEUE], 't' .. tenant)
    weight = 0
  end
  add_to_queue(keys, 'weights', weight - had_weight)
end

-- Is a request within the limits, or within its tenant's share of them?
local function may_wait(keys, row)
  local requests, tokens = queue_sizes(keys)
  if requests < row.most_requests and (requests == 0 or tokens + row.tokens <= row.most_tokens) then
    return true
  end
  local known = redis.call('HGET', keys[QUEUE], 't' .. row.tenant)
  local own_requests, own_tokens, own_weight = string.match(known or '0 0 0', '^(%d+) (%d+) (%d+)$')
  local share = row.weight / (queue_number(keys, 'weights') - (own_weight or 0) + row.weight)
  return (own_requests or 0) + 1 <= row.most_requests * share
    and (own_tokens or 0) + row.tokens <= row.most_tokens * share
end

-- Removes a request that waits.
local function leave_queue(keys, id, entry, now)
  redis.call('HDEL', keys[WAITING_REQUESTS], id)
  redis.call('ZREM', keys[DEADLINES], 'e' .. id)
  if redis.call('EXISTS', keys[WAITING_REQUESTS]) == 0 then
    redis.call('UNLINK', keys[QUEUE], keys[LINES])
    redis.call('HSET', keys[QUEUE], 'idle', string.format('%d', now))
    return
  end
  local line = entry[E_LINE]
  local lane, account = string.sub(line, 1, LANE_END), string.sub(line, ACCOUNT_AT)
  redis.call('ZREM', keys[LINES], 'p' .. line .. entry[E_PLACE] .. id, 'r' .. entry[E_ROUTER] .. '\0' .. id)
  if add_to_queue(keys, 'n' .. line, -1) <= 0 then
    redis.call('ZREM', keys[LINES], turn_member(lane, account, counter_of(keys, account)))
    add_to_queue(keys, 'lines', -1)
  end
  add_to_queue(keys, 'a' .. account, -1)
  if add_to_queue(keys, 'c' .. lane, -1) <= 0 then
    redis.call('HDEL', keys[QUEUE], 'l' .. lane, 'k' .. lane)
    local left = {}
    for _, other in ipairs(lanes_of(keys)) do
      left[#left + 1] = other ~= lane and other or nil
    end
    redis.call('HSET', keys[QUEUE], 'lanes', table.concat(left))
  end
  add_to_queue(keys, 'o' .. entry[E_ROUTER], -1)
  add_to_queue(keys, 'tokens', -entry[E_TOKENS])
  count_tenant(keys, entry[E_TENANT], -1, -entry[E_TOKENS])
end

local function renew_queue_lease(keys, router, now)
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + LEASE_US), 'q' .. router)
end

-- Adds a request to the queue, unless it waits already. Returns false if it may not wait.
local function enter_queue(keys, row, router, now)
  renew_queue_lease(keys, router, now)
  if redis.call('HEXISTS', keys[WAITING_REQUESTS], row.id) == 1 then
    return true
  end
  if redis.call('EXISTS', keys[WAITING_REQUESTS]) == 0 then
    if now - queue_number(keys, 'idle') > FORGET_US then
      redis.call('UNLINK', keys[COUNTERS])
    end
    redis.call('UNLINK', keys[QUEUE], keys[LINES])
  end
  local lane, tenant, lines = row.lane, row.tenant, queue_number(keys, 'lines')
  local is_new_lane = redis.call('HEXISTS', keys[QUEUE], 'c' .. lane) == 0
  if is_new_lane and #lanes_of(keys) >= MOST_LANES then
    lane = ALL_WORKERS
    is_new_lane = redis.call('HEXISTS', keys[QUEUE], 'c' .. lane) == 0
  end
  local account = account_of(row, tenant)
  local is_new_line = redis.call('HEXISTS', keys[QUEUE], 'n' .. lane .. account) == 0
  if is_new_line and lines >= MOST_LINES then
    account = account_of(row, SHARED)
    is_new_line = redis.call('HEXISTS', keys[QUEUE], 'n' .. lane .. account) == 0
  end
  if not may_wait(keys, row) or (is_new_line and lines >= 2 * MOST_LINES) then
    return false
  end
  local runs = row.program ~= '' and redis.call('ZSCORE', keys[DEADLINES], 'a' .. tenant .. row.program)
  local first = runs and tonumber(runs) > now and '0' or '1'
  local line, due = lane .. account, now + row.left
  local place = first .. padded(due) .. padded(math.max(0, now - row.age))
  local entry = { router, line, place, row.tokens, service_units(row.tokens, 0, row.output), row.weight, tenant }
  local counter = counter_of(keys, account)
  if add_to_queue(keys, 'a' .. account, 1) == 1 then
    local served = tonumber(redis.call('HGET', keys[COUNTERS], 'v' .. string.sub(account, 1, 8)) or 0) or 0
    counter = math.max(counter, served)
    redis.call('HSET', keys[COUNTERS], 'c' .. account, string.format('%d', counter))
  end
  redis.call('HSET', keys[WAITING_REQUESTS], row.id, cmsgpack.pack(entry))
  redis.call('ZADD', keys[DEADLINES], string.format('%d', due), 'e' .. row.id)
  redis.call('ZADD', keys[LINES], 0, 'p' .. line .. place .. row.id, 0, 'r' .. router .. '\0' .. row.id)
  if add_to_queue(keys, 'n' .. line, 1) == 1 then
    redis.call('ZADD', keys[LINES], 0, turn_member(lane, account, counter))
    add_to_queue(keys, 'lines', 1)
  end
  if is_new_lane then
    local workers = lane == row.lane and row.workers
    redis.call('HSET', keys[QUEUE], 'l' .. lane, workers and cmsgpack.pack(workers) or '')
    redis.call('HSET', keys[QUEUE], 'lanes', (redis.call('HGET', keys[QUEUE], 'lanes') or '') .. lane)
  end
  add_to_queue(keys, 'c' .. lane, 1)
  add_to_queue(keys, 'o' .. router, 1)
  add_to_queue(keys, 'tokens', row.tokens)
  count_tenant(keys, tenant, 1, row.tokens, row.weight)
  return true
end

-- Drops what waits at a router that no longer asks, up to `most` requests. Returns how many.
local function drop_waiting_of(keys, router, most, now)
  local members = redis.call('ZRANGEBYLEX', keys[LINES], '[r' .. router .. '\0', '(r' .. router .. '\1', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local id = string.sub(member, -ID_BYTES)
    local entry = get_entry(keys, id)
    if entry then
      leave_queue(keys, id, entry, now)
    else
      redis.call('ZREM', keys[LINES], member)
    end
  end
  return #members
end

-- ---------------------------------------------------------------- turns

-- Begins to look at the queue. One call looks at each lane's window once.
local function look_at_queue(keys, now)
  return { keys = keys, now = now, alive = {}, windows = {}, workers = {}, left = MOST_REMOVED }
end

local function is_alive(look, router)
  local alive = look.alive[router]
  if alive == nil then
    local ends = redis.call('ZSCORE', look.keys[DEADLINES], 'q' .. router)
    alive = ends and tonumber(ends) > look.now or false
    look.alive[router] = alive
  end
  return alive
end

-- Returns the next request of a line that still waits, after a member of `lines`; it drops some that do not.
local function next_waiting(look, line, after)
  local keys, low = look.keys, after and '(' .. after or '[p' .. line
  while look.left > 0 do
    local member = redis.call('ZRANGEBYLEX', keys[LINES], low, '(p' .. line .. '2', 'LIMIT', 0, 1)[1]
    if not member then
      return nil
    end
    local id = string.sub(member, -ID_BYTES)
    local entry = get_entry(keys, id)
    if not entry then
      redis.call('ZREM', keys[LINES], member)
    elseif tonumber(string.sub(entry[E_PLACE], 2, 17)) <= look.now or not is_alive(look, entry[E_ROUTER]) then
      leave_queue(keys, id, entry, look.now)
    else
      return { member = member, line = line, id = id, entry = entry }
    end
    look.left = look.left - 1
  end
end

-- Gives a request its place in the order of all lanes.
local function put_in_order(one, rank, counter)
  one.counter, one.rank, one.key = counter, rank, rank .. padded(counter) .. one.entry[E_PLACE]
  return one
end

local function hex(id)
  return (string.gsub(id, '.', function(byte)
    return string.format('%02x', string.byte(byte))
  end))
end

-- Does a request come before another one? Strings are compared by the server's locale, so ids are compared as digits.
local function comes_before(one, other)
  return one.key < other.key or (one.key == other.key and hex(one.id) < hex(other.id))
end

-- Returns the first requests of a lane in their order, as many as its window has.
local function window_of(look, lane)
  if look.windows[lane] then
    return look.windows[lane]
  end
  local keys, heads, first = look.keys, {}, {}
  look.lanes = look.lanes or lanes_of(keys)
  local most = math.min(queue_number(keys, 'k' .. lane), math.floor(MOST_WINDOW / math.max(1, #look.lanes)))
  most = math.max(1, most)
  local members = redis.call('ZRANGEBYLEX', keys[LINES], '[t' .. lane, '(t' .. lane .. 'g', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local rank, counter, tenant = string.sub(member, 18, 25), tonumber(string.sub(member, 26, 41)), string.sub(member, 42)
    local line = lane .. rank .. tenant
    local one = next_waiting(look, line)
    if one then
      heads[#heads + 1] = put_in_order(one, rank, counter)
    elseif redis.call('HEXISTS', keys[QUEUE], 'n' .. line) == 0 then
      redis.call('ZREM', keys[LINES], member)
    end
  end
  while #first < most and heads[1] do
    local least = 1
    for i = 2, #heads do
      if comes_before(heads[i], heads[least]) then
        least = i
      end
    end
    local one = table.remove(heads, least)
    first[#first + 1] = one
    local after = #first < most and next_waiting(look, one.line, one.member)
    if after then
      local counter = one.counter + math.floor(one.entry[E_UNITS] * 1000 / one.entry[E_WEIGHT])
      heads[#heads + 1] = put_in_order(after, one.rank, counter)
    end
  end
  look.windows[lane] = first
  return first
end

-- Returns the workers of a lane; false for all.
local function workers_of_lane(look, lane)
  if look.workers[lane] == nil then
    local packed = redis.call('HGET', look.keys[QUEUE], 'l' .. lane)
    look.workers[lane] = packed and packed ~= '' and cmsgpack.unpack(packed) or false
  end
  return look.workers[lane]
end

-- Returns the first requests of all lanes, each with its lane, in their order.
local function heads_of(look)
  if not look.heads then
    look.heads = {}
    for _, lane in ipairs(lanes_of(look.keys)) do
      local head = window_of(look, lane)[1]
      if head then
        head.lane = lane
        look.heads[#look.heads + 1] = head
      end
    end
    table.sort(look.heads, comes_before)
  end
  return look.heads
end

-- Returns the requests of a lane that may be tried now: { { id, entry, ahead = lanes to which it leaves their workers }... }
local function turns_of(look, lane)
  local heads, mine, turns, taken, ahead, at = heads_of(look), workers_of_lane(look, lane), {}, {}, {}, 1
  for _, one in ipairs(window_of(look, lane)) do
    while heads[at] and comes_before(heads[at], one) do
      local other = heads[at].lane
      at = at + 1
      if other ~= lane then
        local workers, left = workers_of_lane(look, other), not mine
        if not workers then
          return turns
        end
        for _, worker in ipairs(workers) do
          taken[worker] = true
        end
        for _, worker in ipairs(mine or {}) do
          left = left or not taken[worker]
        end
        if not left then
          return turns
        end
        ahead[#ahead + 1] = other
      end
    end
    turns[#turns + 1] = { id = one.id, entry = one.entry, ahead = { unpack(ahead) } }
  end
  return turns
end

-- Returns the set of workers that a request must leave to others if it is tried now; nil if it is not its turn.
local function blocked_for(keys, id, now)
  local entry, look = get_entry(keys, id), look_at_queue(keys, now)
  if not entry then
    return nil
  end
  for _, turn in ipairs(turns_of(look, string.sub(entry[E_LINE], 1, LANE_END))) do
    if turn.id == id then
      local blocked = {}
      for _, lane in ipairs(turn.ahead) do
        for _, worker in ipairs(workers_of_lane(look, lane)) do
          blocked[worker] = true
        end
      end
      return blocked
    end
  end
end

-- Returns about how many requests go before one that waits.
local function count_ahead(keys, id)
  local entry = get_entry(keys, id)
  if not entry then
    return 0
  end
  local line, ahead = entry[E_LINE], 0
  local lane, rank, tenant = string.sub(line, 1, 16), string.sub(line, 17, 24), string.sub(line, 25)
  local start = 'p' .. line
  local before = redis.call('ZLEXCOUNT', keys[LINES], '[' .. start, '(' .. start .. entry[E_PLACE] .. id)
  local own = padded(counter_of(keys, rank .. tenant)) .. tenant
  local members = redis.call('ZRANGEBYLEX', keys[LINES], '[t' .. lane, '(t' .. lane .. 'g', 'LIMIT', 0, MOST_AHEAD)
  for _, member in ipairs(members) do
    local other_rank, other = string.sub(member, 18, 25), string.sub(member, 26)
    if other_rank > rank then
      break
    elseif other == own and other_rank == rank then
      ahead = ahead + before
    else
      local waiting = queue_number(keys, 'n' .. lane .. other_rank .. string.sub(member, 42))
      ahead = ahead + (other_rank < rank and waiting or math.min(waiting, before + (other < own and 1 or 0)))
    end
  end
  return ahead
end

-- ---------------------------------------------------------------- bookings

-- Records that a request found no room: only the first one is tried next.
local function narrow_window(keys, id)
  local entry = get_entry(keys, id)
  if entry then
    redis.call('HSET', keys[QUEUE], 'k' .. string.sub(entry[E_LINE], 1, LANE_END), 1)
  end
end

-- Adds to what an account was served.
local function charge(keys, account, weight, service)
  local rank, before = string.sub(account, 1, 8), counter_of(keys, account)
  local served = tonumber(redis.call('HGET', keys[COUNTERS], 'v' .. rank) or 0) or 0
  local after = before + math.floor(service * 1000 / weight)
  redis.call('HSET', keys[COUNTERS], 'v' .. rank, string.format('%d', math.max(served, before)))
  redis.call('HSET', keys[COUNTERS], 'c' .. account, string.format('%d', after))
  for _, lane in ipairs(lanes_of(keys)) do
    if redis.call('ZREM', keys[LINES], turn_member(lane, account, before)) == 1 then
      redis.call('ZADD', keys[LINES], 0, turn_member(lane, account, after))
    end
  end
end

-- Records that a request was booked. If it or others waited, its tenant is charged.
local function record_queue_booked(keys, row, uncached, cached, now)
  if row.program ~= '' then
    redis.call('ZADD', keys[DEADLINES], string.format('%d', now + PROGRAM_US), 'a' .. row.tenant .. row.program)
  end
  if redis.call('EXISTS', keys[WAITING_REQUESTS]) == 0 then
    return
  end
  local account, entry = account_of(row, row.tenant), get_entry(keys, row.id)
  if entry then
    account = string.sub(entry[E_LINE], ACCOUNT_AT)
    local lane = 'k' .. string.sub(entry[E_LINE], 1, LANE_END)
    redis.call('HSET', keys[QUEUE], lane, math.min(MOST_WINDOW, 2 * math.max(1, queue_number(keys, lane))))
    leave_queue(keys, row.id, entry, now)
  end
  charge(keys, account, row.weight, service_units(uncached, cached, row.output))
end
