-- The requests that wait for a worker with room: how they enter and leave. `_queue_turns.lua` has the order in which they may
-- be tried, `_queue_charges.lua` what bookings cost their tenants. The Python twin, which explains the order, is
-- `kvatlas/reservations/pool_queue.py`.
--
-- A line is <lane> <rank, 8 hex digits> <tenant>; lanes and tenants are 16 hex digits. An account is the end of a line, <rank>
-- <tenant>. A place is <0 if its program runs, else 1> <deadline in us, 16 digits> <us at which it arrived, 16 digits>.
--
-- queued_requests  id (16 bytes) -> cmsgpack { router, line, place, prompt tokens, expected units, weight in thousandths,
--                  tenant }
-- queue_lines      by bytes: 'p' <line> <place> <id> what waits in a line; 'r' <router> \0 <id> what waits at a router; 't'
--                  <lane> <rank> <counter of the account, 16 digits> <tenant> the lines in their order; 'g' <rank> <counter>
--                  <tenant> the accounts in theirs; 'm' <tenant> <lane> <rank> a tenant's lines
-- queue_numbers    'tokens' all prompts'; 'lines' how many there are; 'lanes' their names, one after another; 'weights' the sum
--                  of all tenants'; 'n' <line>, 'a' <account>, 'c' <lane>, 'o' <router> how many wait there; 't' <tenant> ->
--                  "requests tokens weight"; 'l' <lane> -> cmsgpack list of its workers, '' for all; 'k' <lane> -> its window;
--                  if nothing waits, only 'idle' -> us since when
-- queue_counters   'c' <account> -> service of what was booked while requests waited; 'v' <rank> -> the highest before a
--                  booking
-- queue_deadlines  'e' <id> a request may wait no longer; 'q' <router> it no longer asks; 'a' <program> it no longer runs
-- queue_charges    id of a booking -> "<account> <weight in thousandths> <output tokens> <units>" with which it was charged
--
-- row, cmsgpack: { id, tenant, weight in thousandths, rank, program (16 hex digits; '': none), prompt tokens, output tokens, us
--   since it arrived, us that it may wait, lane, { workers... } (0: all), most requests, most tokens, 1 if it may wait, 0 if it
--   is only charged }

local LEASE_US, FORGET_US = 1000000, 60000000
local MOST_WINDOW, MOST_LANES, MOST_LINES = 16, 32, 512
local MOST_COUNTERS, MOST_COUNTER = 2048, 9000000000000000
local UNCACHED_UNITS, CACHED_UNITS, OUTPUT_UNITS = 10, 1, 20
local MOST_LANE_WORKERS, MOST_RANK, MOST_COUNTED = 64, 4294967294, 2 ^ 40
local MOST_DROPPED, LINE_COSTS = 64, 3 -- that one call drops first; a line that ends costs as much as some requests
local ALL_WORKERS, STRAYS, SHARED = '0000000000000000', 'ffffffffffffffff', '0000000000000000'
local E_ROUTER, E_LINE, E_PLACE, E_TOKENS, E_UNITS, E_WEIGHT, E_TENANT = 1, 2, 3, 4, 5, 6, 7
local ENTRY_FORM = { 'string', 'string', 'string', 'number', 'number', 'number', 'string' }
local LANE_END, ACCOUNT_AT, ACCOUNT_BYTES = 16, 17, 24 -- within a line

local function service_units(uncached, cached, output)
  return UNCACHED_UNITS * uncached + CACHED_UNITS * cached + OUTPUT_UNITS * output
end

local function padded(number)
  return string.format('%016d', number)
end

-- Unpacks a router's row of a request. Raises an error if a value is out of bounds.
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
    program = name(row[5], true), tokens = integer(row[6], 0, MOST_COUNTED), output = integer(row[7], 0, MOST_COUNTED),
    age = integer(row[8], 0), left = integer(row[9], 0, 2 ^ 40), lane = name(row[10]), workers = workers,
    most_requests = integer(row[12], 0), most_tokens = integer(row[13], 0), may_wait = row[14] ~= 0,
  }
end

local function account_of(row, tenant)
  return string.format('%08x', row.rank) .. tenant
end

local function get_entry(keys, id)
  local packed = redis.call('HGET', keys[QUEUED_REQUESTS], id)
  return packed and unpack_record(packed, ENTRY_FORM, 'waiting request')
end

-- Adds to a number of the queue, which is removed at 0. Returns the sum.
local function add_to_queue(keys, field, number)
  local sum = redis.call('HINCRBY', keys[QUEUE_NUMBERS], field, string.format('%d', number))
  if sum <= 0 then
    redis.call('HDEL', keys[QUEUE_NUMBERS], field)
  end
  return sum
end

-- Returns a number of the queue.
local function queue_number(keys, field)
  return tonumber(redis.call('HGET', keys[QUEUE_NUMBERS], field) or 0) or 0
end

local function queue_sizes(keys)
  return redis.call('HLEN', keys[QUEUED_REQUESTS]), queue_number(keys, 'tokens')
end

local function lanes_of(keys)
  local names, lanes = redis.call('HGET', keys[QUEUE_NUMBERS], 'lanes') or '', {}
  for at = 1, #names, LANE_END do
    lanes[#lanes + 1] = string.sub(names, at, at + LANE_END - 1)
  end
  return lanes
end

local function counter_of(keys, account)
  return tonumber(redis.call('HGET', keys[QUEUE_COUNTERS], 'c' .. account) or 0) or 0
end

-- Returns the member of `queue_lines` that puts a line in order.
local function turn_member(lane, account, counter)
  return 't' .. lane .. string.sub(account, 1, 8) .. padded(counter) .. string.sub(account, 9)
end

-- Returns the member of `queue_lines` that puts an account in order.
local function account_member(account, counter)
  return 'g' .. string.sub(account, 1, 8) .. padded(counter) .. string.sub(account, 9)
end

-- Returns the member of `queue_lines` that lists a line among its tenant's.
local function own_member(lane, account)
  return 'm' .. string.sub(account, 9) .. lane .. string.sub(account, 1, 8)
end

-- Changes a tenant's requests and tokens; drops a tenant without requests. `weight`: its current one.
local function count_tenant(keys, tenant, requests, tokens, weight)
  local known = redis.call('HGET', keys[QUEUE_NUMBERS], 't' .. tenant)
  local had_requests, had_tokens, had_weight = string.match(known or '0 0 0', '^(%d+) (%d+) (%d+)$')
  if not had_requests then
    damaged('tenant of a queue')
  end
  requests, weight = had_requests + requests, weight or tonumber(had_weight)
  if requests > 0 then
    redis.call('HSET', keys[QUEUE_NUMBERS], 't' .. tenant, string.format('%d %d %d', requests, had_tokens + tokens, weight))
  else
    redis.call('HDEL', keys[QUEUE_NUMBERS], 't' .. tenant)
    weight = 0
  end
  add_to_queue(keys, 'weights', weight - had_weight)
end

-- Returns whether a request is within the limits, or within its tenant's share of the limits.
local function may_wait(keys, row)
  local requests, tokens = queue_sizes(keys)
  if requests < row.most_requests and (requests == 0 or tokens + row.tokens <= row.most_tokens) then
    return true
  end
  local known = redis.call('HGET', keys[QUEUE_NUMBERS], 't' .. row.tenant)
  local own_requests, own_tokens, own_weight = string.match(known or '0 0 0', '^(%d+) (%d+) (%d+)$')
  local share = row.weight / (queue_number(keys, 'weights') - (own_weight or 0) + row.weight)
  return (own_requests or 0) + 1 <= row.most_requests * share
    and (own_tokens or 0) + row.tokens <= row.most_tokens * share
end

-- ---------------------------------------------------------------- counters

-- Forgets the counters of accounts that have no waiting requests.
local function forget_counters(keys)
  local fields, known = {}, redis.call('HGETALL', keys[QUEUE_COUNTERS])
  for at = 1, #known, 2 do
    fields[#fields + 1] = known[at]
  end
  for first = 1, #fields, CHUNK do
    local some, waiting, gone = { unpack(fields, first, math.min(#fields, first + CHUNK - 1)) }, {}, {}
    for i, field in ipairs(some) do
      waiting[i] = 'a' .. string.sub(field, 2)
    end
    for i, number in ipairs(redis.call('HMGET', keys[QUEUE_NUMBERS], unpack(waiting))) do
      if not number or string.sub(some[i], 1, 1) ~= 'c' then
        gone[#gone + 1] = some[i]
      end
    end
    if gone[1] then
      redis.call('HDEL', keys[QUEUE_COUNTERS], unpack(gone))
    end
  end
end

-- Changes the counter of an account, and thereby the place of its lines. Returns the counter.
local function set_counter(keys, account, counter)
  local known, after = redis.call('HGET', keys[QUEUE_COUNTERS], 'c' .. account), math.min(math.max(0, counter), MOST_COUNTER)
  if not known and redis.call('HLEN', keys[QUEUE_COUNTERS]) >= MOST_COUNTERS then
    forget_counters(keys)
  end
  redis.call('HSET', keys[QUEUE_COUNTERS], 'c' .. account, string.format('%d', after))
  local before = tonumber(known or 0) or 0
  if after ~= before and redis.call('HEXISTS', keys[QUEUE_NUMBERS], 'a' .. account) == 1 then
    local rank, start = string.sub(account, 1, 8), 'm' .. string.sub(account, 9)
    local old, new = { account_member(account, before) }, { 0, account_member(account, after) }
    for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[' .. start, '(' .. start .. 'g')) do
      if string.sub(member, -8) == rank then
        local lane = string.sub(member, 18, 33)
        old[#old + 1] = turn_member(lane, account, before)
        new[#new + 1], new[#new + 2] = 0, turn_member(lane, account, after)
      end
    end
    redis.call('ZREM', keys[QUEUE_LINES], unpack(old))
    redis.call('ZADD', keys[QUEUE_LINES], unpack(new))
  end
  return after
end

-- Returns the least counter of tenants other than this account's, among members that begin like this; nil if there are none.
local function least_of_others(keys, start, account)
  local tenant, low, high = string.sub(account, 9), '[' .. start, '(' .. start .. 'g'
  for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], low, high, 'LIMIT', 0, 2)) do
    if string.sub(member, -16) ~= tenant then
      return tonumber(string.sub(member, -32, -17))
    end
  end
end

-- Returns the counter at which an account begins to wait in a lane: the least of others there, else of others in any lane.
local function first_counter(keys, lane, account)
  local rank = string.sub(account, 1, 8)
  local least = least_of_others(keys, 't' .. lane .. rank, account) or least_of_others(keys, 'g' .. rank, account)
    or tonumber(redis.call('HGET', keys[QUEUE_COUNTERS], 'v' .. rank) or 0) or 0
  return math.max(counter_of(keys, account), least)
end

-- ---------------------------------------------------------------- entering and leaving

-- Removes requests that are waiting, { { id, entry }... }.
local function leave_queue(keys, gone, now)
  if not gone[1] then
    return
  end
  local ids, ends, members, sums, tenants, ended = {}, {}, {}, {}, {}, 0
  local function add(field, number)
    sums[field] = (sums[field] or 0) + number
  end
  for i, one in ipairs(gone) do
    ids[i], ends[i] = one.id, 'e' .. one.id
  end
  redis.call('HDEL', keys[QUEUED_REQUESTS], unpack(ids))
  redis.call('ZREM', keys[QUEUE_DEADLINES], unpack(ends))
  if redis.call('EXISTS', keys[QUEUED_REQUESTS]) == 0 then
    redis.call('UNLINK', keys[QUEUE_NUMBERS], keys[QUEUE_LINES])
    redis.call('HSET', keys[QUEUE_NUMBERS], 'idle', string.format('%d', now))
    return
  end
  for _, one in ipairs(gone) do
    local entry, line = one.entry, one.entry[E_LINE]
    members[#members + 1] = 'p' .. line .. entry[E_PLACE] .. one.id
    members[#members + 1] = 'r' .. entry[E_ROUTER] .. '\0' .. one.id
    add('n' .. line, -1)
    add('a' .. string.sub(line, ACCOUNT_AT), -1)
    add('c' .. string.sub(line, 1, LANE_END), -1)
    add('o' .. entry[E_ROUTER], -1)
    add('tokens', -entry[E_TOKENS])
    local of = tenants[entry[E_TENANT]] or { 0, 0 }
    of[1], of[2], tenants[entry[E_TENANT]] = of[1] - 1, of[2] - entry[E_TOKENS], of
  end
  for field, number in pairs(sums) do
    local kind, name = string.sub(field, 1, 1), string.sub(field, 2)
    if add_to_queue(keys, field, number) > 0 or field == 'tokens' then
      kind = ''
    end
    if kind == 'n' then
      local lane, account = string.sub(name, 1, LANE_END), string.sub(name, ACCOUNT_AT)
      members[#members + 1] = turn_member(lane, account, counter_of(keys, account))
      members[#members + 1] = own_member(lane, account)
      ended = ended + 1
    elseif kind == 'a' then
      members[#members + 1] = account_member(name, counter_of(keys, name))
    elseif kind == 'c' then
      redis.call('HDEL', keys[QUEUE_NUMBERS], 'l' .. name, 'k' .. name)
      local left = {}
      for _, other in ipairs(lanes_of(keys)) do
        left[#left + 1] = other ~= name and other or nil
      end
      redis.call('HSET', keys[QUEUE_NUMBERS], 'lanes', table.concat(left))
    end
  end
  redis.call('ZREM', keys[QUEUE_LINES], unpack(members))
  add_to_queue(keys, 'lines', -ended)
  for tenant, of in pairs(tenants) do
    count_tenant(keys, tenant, of[1], of[2])
  end
end

local function leave_one(keys, id, entry, now)
  leave_queue(keys, { { id = id, entry = entry } }, now)
end

-- Adds a request to those that leave, { { id, entry }..., id -> true, line -> true }. Returns its cost, as a part of
-- MOST_DROPPED.
local function add_to_gone(gone, id, entry)
  local line = entry[E_LINE]
  local cost = gone[line] and 1 or 1 + LINE_COSTS
  if not gone[id] then
    gone[#gone + 1] = { id = id, entry = entry }
  end
  gone[id], gone[line] = true, true
  return cost
end

-- Adds the requests of a router that no longer asks for them to those that leave, up to `most`. Returns how much of `most` was
-- used; `most` or above if there may be more requests.
local function add_waiting_of(keys, router, gone, most)
  local used, start = 0, 'r' .. router
  local members = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[' .. start .. '\0', '(' .. start .. '\1', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    if used >= most then
      break
    end
    local id = string.sub(member, -ID_BYTES)
    local entry = get_entry(keys, id)
    if not entry then
      redis.call('ZREM', keys[QUEUE_LINES], member)
    end
    used = used + (entry and add_to_gone(gone, id, entry) or 1)
  end
  return used
end

-- Drops requests that have waited too long or whose router no longer asks, and programs that no longer run, up to MOST_DROPPED.
local function purge_queue(keys, now)
  local left, gone, over = MOST_DROPPED, {}, {}
  local last = string.format('%d', now)
  local due = redis.call('ZRANGEBYSCORE', keys[QUEUE_DEADLINES], '-inf', last, 'LIMIT', 0, MOST_DROPPED)
  for _, member in ipairs(due) do
    if left <= 0 then
      break
    end
    local kind, name, used = string.sub(member, 1, 1), string.sub(member, 2), 0
    if kind == 'q' then
      used = add_waiting_of(keys, name, gone, left)
    elseif kind == 'e' then
      local entry = get_entry(keys, name)
      used = entry and add_to_gone(gone, name, entry) or 0
    end
    if kind ~= 'q' or used < left then
      over[#over + 1] = member
    end
    left = left - math.max(1, used)
  end
  if over[1] then
    redis.call('ZREM', keys[QUEUE_DEADLINES], unpack(over))
  end
  leave_queue(keys, gone, now)
end

local function renew_queue_lease(keys, router, now)
  redis.call('ZADD', keys[QUEUE_DEADLINES], string.format('%d', now + LEASE_US), 'q' .. router)
end

local function own_lines(keys, tenant)
  return redis.call('ZLEXCOUNT', keys[QUEUE_LINES], '[m' .. tenant, '(m' .. tenant .. 'g')
end

-- Returns the lane in which a request may wait.
local function lane_for(keys, row)
  local lane = row.lane
  if lane == ALL_WORKERS or redis.call('HEXISTS', keys[QUEUE_NUMBERS], 'c' .. lane) == 1
    or own_lines(keys, row.tenant) < MOST_LANES - #lanes_of(keys) then
    return lane
  end
  return STRAYS
end

-- Returns a tenant's account in a lane with the next lower priority, else the next higher one; nil if it has none there.
local function nearest_account(keys, lane, rank, tenant)
  local start = 'm' .. tenant .. lane
  local at, last = start .. string.format('%08x', rank), '(' .. start .. 'g'
  local member = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[' .. at, last, 'LIMIT', 0, 1)[1]
  if not member then
    local lines = redis.call('ZLEXCOUNT', keys[QUEUE_LINES], '[' .. start, last)
    member = redis.call('ZRANGEBYLEX', keys[QUEUE_LINES], '[' .. start, last, 'LIMIT', math.max(0, lines - 1), 1)[1]
  end
  return member and string.sub(member, -8) .. tenant
end

-- Returns the account of the line in which a request may wait; nil if there is no room for another line.
local function account_for(keys, row, lane)
  local lines = queue_number(keys, 'lines')
  for shared, tenant in ipairs({ row.tenant, SHARED }) do
    local account, left = account_of(row, tenant), shared * MOST_LINES - lines
    if redis.call('HEXISTS', keys[QUEUE_NUMBERS], 'n' .. lane .. account) == 1 or own_lines(keys, tenant) < left then
      return account
    end
    local nearest = nearest_account(keys, lane, row.rank, tenant)
    if nearest or left > 0 then
      return nearest or account
    end
  end
end

-- Adds a request to the queue, unless it is waiting already. Returns false if it may not wait.
local function enter_queue(keys, row, router, now)
  renew_queue_lease(keys, router, now)
  if redis.call('HEXISTS', keys[QUEUED_REQUESTS], row.id) == 1 then
    return true
  end
  if redis.call('EXISTS', keys[QUEUED_REQUESTS]) == 0 then
    if now - queue_number(keys, 'idle') > FORGET_US then
      redis.call('UNLINK', keys[QUEUE_COUNTERS], keys[QUEUE_CHARGES])
    end
    redis.call('UNLINK', keys[QUEUE_NUMBERS], keys[QUEUE_LINES])
  end
  local lane, tenant = lane_for(keys, row), row.tenant
  local account = account_for(keys, row, lane)
  if not account or not may_wait(keys, row) then
    return false
  end
  local runs = row.program ~= '' and redis.call('ZSCORE', keys[QUEUE_DEADLINES], 'a' .. tenant .. row.program)
  local first = runs and tonumber(runs) > now and '0' or '1'
  local line, due = lane .. account, now + row.left
  local place = first .. padded(due) .. padded(math.max(0, now - row.age))
  local entry = { router, line, place, row.tokens, service_units(row.tokens, 0, row.output), row.weight, tenant }
  if redis.call('HEXISTS', keys[QUEUE_NUMBERS], 'n' .. line) == 0 then
    local counter = set_counter(keys, account, first_counter(keys, lane, account))
    redis.call('ZADD', keys[QUEUE_LINES], 0, turn_member(lane, account, counter), 0, own_member(lane, account))
    add_to_queue(keys, 'lines', 1)
  end
  redis.call('HSET', keys[QUEUED_REQUESTS], row.id, cmsgpack.pack(entry))
  redis.call('ZADD', keys[QUEUE_DEADLINES], string.format('%d', due), 'e' .. row.id)
  redis.call('ZADD', keys[QUEUE_LINES], 0, 'p' .. line .. place .. row.id, 0, 'r' .. router .. '\0' .. row.id)
  add_to_queue(keys, 'n' .. line, 1)
  if add_to_queue(keys, 'a' .. account, 1) == 1 then
    redis.call('ZADD', keys[QUEUE_LINES], 0, account_member(account, counter_of(keys, account)))
  end
  if add_to_queue(keys, 'c' .. lane, 1) == 1 then
    local workers = lane ~= STRAYS and row.workers
    redis.call('HSET', keys[QUEUE_NUMBERS], 'l' .. lane, workers and cmsgpack.pack(workers) or '')
    redis.call('HSET', keys[QUEUE_NUMBERS], 'lanes', (redis.call('HGET', keys[QUEUE_NUMBERS], 'lanes') or '') .. lane)
  end
  add_to_queue(keys, 'o' .. router, 1)
  add_to_queue(keys, 'tokens', row.tokens)
  count_tenant(keys, tenant, 1, row.tokens, row.weight)
  return true
end
