-- sweep: takes retired holders out of some scopes' blocks, as far as the budget goes.
--
-- KEYS 1 retired
--      2 digests
--      3... blocks of each scope; with the side index also its children and parents
-- ARGV 1 server on which the sweep began ('': here)
--      2 budget: the cost of what is looked at (see below)
--      3 cursor in the first scope
--      4 packed scope ids
--      5 packed holders
-- returns {server, scopes done, cursor in the next, cost}; on another server than the sweep began on, where
--   the cursor means nothing, {server} alone

local SCAN_COUNT = 16 -- a value may be as long as there are workers
local BLOCK_COST, ENTRY_COST = 1, 0.1

-- Takes holders out of some blocks. flat: {hash, value...}; gone: {entry -> is it of a retired holder, as far as was looked}.
-- Returns what they cost, and adds up what was taken out by entry: sums_by_entry[entry] = {count, low, high}.
local function take_out(scope, flat, is_gone, sums_by_entry)
  local groups, cost, set, gone = {}, 0, {}, {}
  for i = 1, #flat, 2 do
    local hash, value = flat[i], flat[i + 1]
    local group = groups[value]
    if not group then
      group = { hashes = {}, entries = {}, rest = {} }
      groups[value] = group
      for at = 1, #value, 4 do
        local entry = string.sub(value, at, at + 3)
        table.insert(is_gone[entry] and group.entries or group.rest, entry)
      end
      cost = cost + ENTRY_COST * #value / 4
      group.rest = table.concat(group.rest)
    end
    cost = cost + BLOCK_COST
    if group.entries[1] then
      group.hashes[#group.hashes + 1] = hash
      if group.rest == '' then
        gone[#gone + 1] = hash
      else
        set[#set + 1] = hash
        set[#set + 1] = group.rest
      end
    end
  end
  for _, group in pairs(groups) do
    local count = #group.hashes
    if count > 0 then
      local low, high = sums(table.concat(group.hashes))
      for _, entry in ipairs(group.entries) do
        local total = sums_by_entry[entry]
        if not total then
          total = { 0, 0, 0 }
          sums_by_entry[entry] = total
        end
        total[1], total[2], total[3] = total[1] + count, total[2] + low, total[3] + high
      end
    end
  end
  write_fields(scope.blocks, set)
  if gone[1] then
    redis.call('HDEL', scope.blocks, unpack(gone))
  end
  if scope.side then
    for _, hash in ipairs(gone) do
      unlink(scope.side, hash)
    end
  end
  return cost
end

-- Counts what was taken out of one scope out of the holders' digests. digests: {holder -> digest}, those changed so far
local function count_out(key, digests, scope, sums_by_entry)
  for entry, total in pairs(sums_by_entry) do
    local holder, flags = string.sub(entry, 1, 3), string.byte(entry, 4) or 0 -- or torn
    digests[holder] = digests[holder] or read_digest(key, holder)
    for tier = 0, 4 do
      if bit.band(flags, 2 ^ tier) ~= 0 then
        count_sums(digests[holder], tier, total[1], total[2], total[3], scope, -1)
      end
    end
  end
end

register_always('kvatlas_sweep', function(keys, args)
  local retired, digests_key, server = keys[1], keys[2], server_id()
  local began_on, budget, cursor, scope_ids = args[1], tonumber(args[2]), args[3], split(args[4])
  if began_on ~= '' and began_on ~= server then
    return { server }
  end
  local swept = retired_among(retired, args[5])
  local is_gone = setmetatable({}, {
    __index = function(known, entry)
      local answer = swept[string.sub(entry, 1, 3)] or false
      known[entry] = answer
      return answer
    end,
  })
  local keys_a_scope = (#keys - 2) / #scope_ids
  local cost, done, digests = 0, 0, {}
  while done < #scope_ids and cost < budget do
    local first_key = 3 + done * keys_a_scope
    local scope, sums_by_entry = { blocks = keys[first_key] }, {}
    scope.mix_low, scope.mix_high = mix_of(scope_ids[done + 1])
    if keys_a_scope == 3 then
      scope.side = { children = keys[first_key + 1], parents = keys[first_key + 2] }
    end
    cost = cost + SCOPE_COST
    repeat
      local flat
      cursor, flat = unpack(redis.call('HSCAN', scope.blocks, cursor, 'COUNT', SCAN_COUNT))
      cost = cost + take_out(scope, flat, is_gone, sums_by_entry)
    until cursor == '0' or cost >= budget
    count_out(digests_key, digests, scope, sums_by_entry)
    if cursor == '0' then
      done = done + 1
    end
  end
  for holder, digest in pairs(digests) do
    redis.call('HSET', digests_key, holder, cmsgpack.pack(digest))
  end
  return { server, done, cursor, math.ceil(cost) }
end)
