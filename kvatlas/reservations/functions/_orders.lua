-- The workers of a pool, sorted by load so that the cheapest one of a group is found by reading just a few.
--
-- A group has the workers of one likeness. Those whose load is known form one family, the others a second one. Each ORDER sorts
-- workers by family and then by a sum of their load, rounded down to 1/64: queued tokens, running requests, KV tokens, or a mix
-- of them. The mix has the ratios of the default rates (kvatlas/cost/engine.py) for an answer of 128 tokens, so for usual
-- prices it is nearly the order of costs. If a load is unknown, only bookings count: what stands in for the rest is the same
-- for all such workers. Workers with equal sums are in the order of the ring.

local FAMILY = 68719476736 -- scores in one family; the scores of 65,536 families are exact in a double
local GROUPS_MOST = 32767
local MIX_TOKENS = 128 -- of output
local KV_PER_RUNNING, TOKENS_PER_WAITING, STEPS_PER_TOKEN = 0.001125, 1024, 64
local SUMS, SUMS_BYTES = '>ddddd', 40
local LOAD_BYTES, GROUP_BYTES = { 1, 72 }, { 97, 112 } -- the bytes of a packed worker that decide its places

-- Returns a worker's member in the orders: its place on the ring, followed by its id.
local function member_of(worker)
  return string.sub(redis.sha1hex(worker), 1, 8) .. worker
end

local function score_in(family, sum)
  return family * FAMILY + math.min(math.max(0, math.floor(sum * STEPS_PER_TOKEN)), FAMILY - 1)
end

-- Returns a worker's score in each order, in the sequence of their keys; no scores if it has no group.
local function scores_of(record)
  if record[GROUP] == 0 then
    return {}
  end
  local family = record[GROUP] * 2 + record[BELIEVED]
  local queued, running, kv, waiting = record[BOOKED_QUEUED], record[BOOKED_RUNNING], record[BOOKED_KV], 0
  if record[BELIEVED] == 1 then
    queued, running, kv, waiting = queued + record[QUEUED], running + record[RUNNING], kv + record[KV], record[WAITING]
  end
  local mix = queued + TOKENS_PER_WAITING * waiting + MIX_TOKENS * (running + KV_PER_RUNNING * kv)
  return { score_in(family, queued), score_in(family, running), score_in(family, kv), score_in(family, mix) }
end

-- Adds a believed sample to the sums of its group, or subtracts it from them (sign -1).
local function add_to_sums(keys, record, sign)
  if record[GROUP] == 0 or record[BELIEVED] == 0 then
    return
  end
  local field = 's' .. record[GROUP]
  local packed = redis.call('HGET', keys[GROUPS], field)
  local known, queued, running, waiting, kv = 0, 0, 0, 0, 0
  if packed then
    if #packed ~= SUMS_BYTES then
      damaged('sums of loads')
    end
    known, queued, running, waiting, kv = struct.unpack(SUMS, packed)
  end
  redis.call('HSET', keys[GROUPS], field, struct.pack(
    SUMS, known + sign, queued + sign * record[QUEUED], running + sign * record[RUNNING],
    waiting + sign * record[WAITING], kv + sign * record[KV]
  ))
end

-- Brings the orders, the samples and the sums up to date. `packed`: the worker's record before; `after` and `record`: now.
local function update_orders(keys, worker, packed, after, record)
  if string.sub(packed, LOAD_BYTES[1], LOAD_BYTES[2]) == string.sub(after, LOAD_BYTES[1], LOAD_BYTES[2])
    and string.sub(packed, GROUP_BYTES[1], GROUP_BYTES[2]) == string.sub(after, GROUP_BYTES[1], GROUP_BYTES[2]) then
    return
  end
  local before, member = { struct.unpack(WORKER, packed) }, nil
  local old, new = scores_of(before), scores_of(record)
  for i = 1, ORDER_MIX - ORDER_QUEUED + 1 do
    if old[i] ~= new[i] then
      member = member or member_of(worker)
      if new[i] then
        redis.call('ZADD', keys[ORDER_QUEUED + i - 1], string.format('%d', new[i]), member)
      else
        redis.call('ZREM', keys[ORDER_QUEUED + i - 1], member)
      end
    end
  end
  local changed = before[GROUP] ~= record[GROUP] or before[BELIEVED] ~= record[BELIEVED]
  for i = SAMPLED, KV do
    changed = changed or before[i] ~= record[i]
  end
  if changed then
    add_to_sums(keys, before, -1)
    add_to_sums(keys, record, 1)
    if record[GROUP] > 0 and record[BELIEVED] == 1 then
      redis.call('ZADD', keys[SAMPLES], string.format('%d', record[SAMPLED]), worker)
    else
      redis.call('ZREM', keys[SAMPLES], worker)
    end
  end
end

-- Returns the number of a likeness's group; 0 for ''.
local function group_of(keys, likeness)
  if likeness == '' then
    return 0
  end
  local number = tonumber(redis.call('HGET', keys[GROUPS], likeness))
  if not number then
    number = redis.call('HINCRBY', keys[GROUPS], 'last', 1)
    if number > GROUPS_MOST then
      return 0 -- routers name such workers one by one
    end
    redis.call('HSET', keys[GROUPS], likeness, number)
  end
  return number
end
