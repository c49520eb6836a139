-- sweep: removes retired holders from the blocks of some scopes, as far as the budget goes.
--
-- KEYS 1 retired
--      2 digests
--      3 held
--      4 holders
--      5 touched
--      6 moments
--      7 spent
--      8... blocks of each scope; with the side index also its children and parents
-- ARGV 1 server on which the sweep began ('': here)
--      2 budget: the cost of what is looked at (see below)
--      3 cursor in the first scope
--      4 packed scope ids
--      5 packed holders
-- returns {server, scopes done, cursor in the next one, cost}; {server} alone if the sweep began on another server, where
--   the cursor means something else

local SWEEP_KEYS = 7
-- budget costs: of a block, of each entry in a new value, of each of these entries that is removed, and of each combination of
-- holder, flags and scope whose digest changes
local BLOCK_COST, ENTRY_COST, GONE_COST, COUNTED_COST = 2, 0.1, 0.5, 8
local SETTLE_COST = 0.5 -- of a holder in a scope

-- Parses a holders value. swept: {number of a holder -> whether it is retired}. Returns the entries of retired holders as
-- numbers, and the value without these entries.
local function without_retired(value, swept)
  local entries, count = entries_of(value)
  local gone, kept, from = {}, {}, 1
  for i = 1, count do
    local entry = entries[i]
    if swept[(entry - entry % 256) / 256] then
      gone[#gone + 1] = entry
      kept[#kept + 1] = string.sub(value, from, 4 * i - 4)
      from = 4 * i + 1
    end
  end
  local torn = string.sub(value, 4 * count + 1)
  kept[#kept + 1] = string.sub(value, from, #torn == 3 and swept[number_of(torn)] and 4 * count or -1)
  return gone, table.concat(kept)
end

-- Removes holders from some blocks, {hash, value...}. Returns the cost, and adds up what was removed by entry:
-- sums_by_entry[entry] = {count, low, high}.
local function take_out(scope, flat, swept, sums_by_entry)
  local groups, cost, set, gone = {}, BLOCK_COST * #flat / 2, {}, {}
  for i = 1, #flat, 2 do
    local hash, value = flat[i], flat[i + 1]
    local group = groups[value]
    if not group then
      group = { hashes = {} }
      group.entries, group.rest = without_retired(value, swept)
      groups[value] = group
      cost = cost + ENTRY_COST * #value / 4 + GONE_COST * #group.entries
    end
    if group.rest ~= value then
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
          cost = cost + COUNTED_COST
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

-- Subtracts the removed entries of one scope from the holders' digests, and records them in `held`, see change_held.
-- digests: {holder -> digest} of those that changed so far
local function count_out(key, digests, held, scope, sums_by_entry)
  local unread = {}
  for entry in pairs(sums_by_entry) do
    local holder = holder_bytes((entry - entry % 256) / 256)
    if not digests[holder] then
      unread[#unread + 1] = holder
    end
  end
  for holder, stored in pairs(read_fields(key, unread)) do
    digests[holder] = digest_of(stored)
  end
  for entry, total in pairs(sums_by_entry) do
    local flags = entry % 256
    local holder = holder_bytes((entry - flags) / 256)
    for tier = 0, 4 do
      if bit.band(flags, 2 ^ tier) ~= 0 then
        count_sums(digests[holder], tier, total[1], total[2], total[3], scope, -1)
        local field = held_field(holder, scope.id, tier)
        held[field] = (held[field] or 0) - total[1]
      end
    end
  end
end

register_always('kvatlas_sweep', function(keys, args)
  local retired, digests_key, server = keys[1], keys[2], server_id()
  local k = { held = keys[3], holders = keys[4], touched = keys[5], moments = keys[6], spent = keys[7] }
  local began_on, budget, cursor, scope_ids = args[1], integer(args[2], 0, 10000), args[3], split(args[4])
  if began_on ~= '' and began_on ~= server then
    return { server }
  end
  local swept, holders, settled = {}, {}, {}
  for holder, is_retired in pairs(retired_among(retired, args[5])) do
    swept[number_of(holder)] = is_retired
    holders[#holders + 1] = is_retired and holder or nil
  end
  local keys_a_scope = (#keys - SWEEP_KEYS) / #scope_ids
  local cost, done, seen, digests, held = 0, 0, 0, {}, {}
  while done < #scope_ids and cost < budget do
    local first_key = SWEEP_KEYS + 1 + done * keys_a_scope
    local scope, sums_by_entry = { id = scope_ids[done + 1], blocks = keys[first_key] }, {}
    scope.mix_low, scope.mix_high = mix_of(scope_ids[done + 1])
    if keys_a_scope == 3 then
      scope.side = { children = keys[first_key + 1], parents = keys[first_key + 2] }
    end
    cost = cost + SCOPE_COST
    repeat
      local flat
      cursor, flat = unpack(redis.call('HSCAN', scope.blocks, cursor, 'COUNT', fields_to_scan(seen, cost, budget)))
      cost = cost + SCAN_COST + take_out(scope, flat, swept, sums_by_entry)
      seen = seen + #flat / 2
    until cursor == '0' or cost >= budget
    count_out(digests_key, digests, held, scope, sums_by_entry)
    if cursor == '0' then
      done = done + 1
      settled[done] = scope.id
      cost = cost + SETTLE_COST * #holders
    end
  end
  local packed = {}
  for holder, digest in pairs(digests) do
    packed[#packed + 1] = holder
    packed[#packed + 1] = cmsgpack.pack(digest)
  end
  write_fields(digests_key, packed)
  change_held(k, held)
  settle_usage(k, holders, settled)
  return { server, done, cursor, math.ceil(cost) }
end)
